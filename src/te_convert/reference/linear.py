"""Twin of te.Linear."""

from __future__ import annotations

import torch
from torch import nn

from te_convert.reference.emulation import linear
from te_convert.reference.module import TwinModule


class Linear(TwinModule):
    """``y = x @ weight.T + bias`` over the last dimension.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        bias: whether there is a ``bias`` of shape [out_features].
        params_dtype: dtype of the parameters; torch's default dtype when None.
        device: device of the parameters; "meta" allocates nothing.

    Shapes: input [..., in_features]; ``weight`` [out_features, in_features]; output [..., out_features].
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        self.bias: nn.Parameter | None
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features, dtype=params_dtype, device=device))
        else:
            self.register_parameter("bias", None)
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, 0.0, 0.023)  # TE's default init_method

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Input [..., in_features] → output [..., out_features]."""
        return linear(self, inp, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Constructor facts for printing."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"
