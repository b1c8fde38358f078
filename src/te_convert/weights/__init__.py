"""Exact invertible weight programs."""
