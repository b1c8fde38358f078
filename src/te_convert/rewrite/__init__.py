"""The only code that mutates a model: a transaction with an undo log."""
