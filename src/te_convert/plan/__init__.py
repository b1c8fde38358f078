"""Decisions as data, and the choice between rules."""
