"""Pure-PyTorch twins of Transformer Engine modules: same names, state-dict keys, shapes and mathematics."""

from te_convert.reference.linear import Linear
from te_convert.reference.norms import LayerNorm, RMSNorm

__all__ = ["LayerNorm", "Linear", "RMSNorm"]
