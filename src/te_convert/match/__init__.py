"""Candidate sites and re-usable guards."""
