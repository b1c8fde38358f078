"""Twin of te.Linear."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from te_convert.reference.emulation import linear
from te_convert.reference.module import TwinModule
from te_convert.reference.parallel import enter_region, leave_region, local_sizes, ranks_of


class Linear(TwinModule):
    """``y = x @ weight.T + bias`` over the last dimension.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        bias: whether there is a ``bias`` of shape [out_features].
        params_dtype: dtype of the parameters; torch's default dtype when None.
        device: device of the parameters; "meta" allocates nothing.
        parallel_mode: "column" or "row" for one rank's part of the weight, see :mod:`te_convert.reference.parallel`.
        tp_group: process group of the ranks that hold the other parts; without one nothing is exchanged.
        tp_size: their number, where there is no group.

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
        parallel_mode: str | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
    ) -> None:
        super().__init__()
        self.parallel_mode, self.tp_size = parallel_mode, ranks_of(tp_group, tp_size)
        self.tp_group = None if parallel_mode is None else tp_group
        in_features, out_features = local_sizes(in_features, out_features, parallel_mode, self.tp_size)
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
        if self.parallel_mode == "row":
            out = leave_region(linear(self, inp, self.weight, None), self.tp_group)
            return out if self.bias is None else out + self.bias.to(out.dtype)
        return linear(self, enter_region(inp, self.tp_group), self.weight, self.bias)

    def extra_repr(self) -> str:
        """Constructor facts for printing."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"
