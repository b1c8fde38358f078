"""Twin of te.GroupedLinear."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from te_convert.reference.emulation import linear
from te_convert.reference.module import TwinModule
from te_convert.reference.precision import activation_input, empty_weight
from te_convert.reference.unsupported import require


class GroupedLinear(TwinModule):
    """Rows in consecutive groups, each through its own Linear: the experts of a mixture after sorting tokens by expert.

    Args:
        num_gemms: number of groups.
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        bias: whether each group has a bias.
        return_bias: leave the biases out and return them as a list.
        params_dtype: dtype of the parameters; torch's default dtype when None.
        device: device of the parameters; "meta" allocates nothing.

    Shapes: input [rows, in_features]; ``weight{i}`` [out_features, in_features]; ``bias{i}`` [out_features];
    output [rows, out_features].

    Source: ``module/grouped_linear.py``.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        require(bias or not return_bias, "return_bias needs bias=True")
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        for index in range(num_gemms):
            self.register_parameter(f"weight{index}", empty_weight(out_features, in_features, params_dtype, device))
            offset = nn.Parameter(torch.zeros(out_features, dtype=params_dtype, device=device)) if bias else None
            self.register_parameter(f"bias{index}", offset)

    def forward(self, inp: Tensor, m_splits: Sequence[int] | Tensor) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Input [rows, ..., in_features] → output [rows, ..., out_features]; ``m_splits`` are the rows of each group.

        Raises:
            NotSupportedError: not one size for each group, or sizes that do not add up to the rows.
        """
        sizes: list[int] = m_splits.tolist() if isinstance(m_splits, Tensor) else list(m_splits)
        require(len(sizes) == self.num_gemms, f"m_splits has {len(sizes)} sizes for {self.num_gemms} groups")
        values = activation_input(inp, self).reshape(-1, self.in_features)
        require(sum(sizes) == len(values), f"m_splits adds up to {sum(sizes)} of {len(values)} rows")
        weights: list[Tensor] = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        biases: list[Tensor | None] = [getattr(self, f"bias{index}") for index in range(self.num_gemms)]
        applied = [None] * self.num_gemms if self.return_bias else biases
        groups = zip(values.split(sizes), weights, applied, strict=True)
        out = torch.cat([linear(self, *group, str(index)) for index, group in enumerate(groups)])
        out = out.reshape(*inp.shape[:-1], self.out_features)
        if self.return_bias:
            return out, [bias.to(out.dtype) for bias in biases if bias is not None]
        return out

    def extra_repr(self) -> str:
        """Constructor facts for printing."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"num_gemms={self.num_gemms}, {sizes}, bias={self.use_bias}"
