"""Which modules the tracer records as one node."""

from __future__ import annotations

from torch import nn

_TRACED_INTO = (nn.MultiheadAttention, nn.Transformer)


def is_builtin_leaf(module: nn.Module) -> bool:
    """True for torch's own childless modules (Embedding, Conv, Dropout, activations, BatchNorm, LSTM, ...)."""
    if next(module.children(), None) is not None or isinstance(module, _TRACED_INTO):
        return False
    return type(module).__module__.startswith(("torch.nn.", "torch.ao.nn."))
