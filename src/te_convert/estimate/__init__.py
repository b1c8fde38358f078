"""Predicted time and memory of a plan on a named GPU, before anything is converted (docs/estimate.md)."""
