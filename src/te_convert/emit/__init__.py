"""Directories on disk: where a model comes from, writing a converted one, loading it back."""
