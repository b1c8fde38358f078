"""Frozen specs, one per TE module, and their construction on a backend."""
