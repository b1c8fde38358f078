"""Pure-PyTorch twins of Transformer Engine modules."""
