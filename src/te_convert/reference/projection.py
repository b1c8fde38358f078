"""Weights that TE keeps in named row blocks, and te.Linear with the arguments that attention needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from te_convert.reference.emulation import linear
from te_convert.reference.module import TwinModule
from te_convert.reference.precision import activation_input, empty_weight
from te_convert.reference.unsupported import require

ParametersSplit = Sequence[str] | Mapping[str, int]


def split_sizes(out_features: int, parameters_split: ParametersSplit | None) -> dict[str, int]:
    """Prefix of each parameter → its rows; the prefix is empty when there is one ``weight``.

    A sequence of names splits evenly, a mapping gives the sizes; a trailing underscore of a name is dropped
    (``module/linear.py``).

    Raises:
        NotSupportedError: no names, or sizes that do not add up to ``out_features``.
    """
    if parameters_split is None:
        return {"": out_features}
    require(len(parameters_split) > 0, "parameters_split names no parameter")
    if isinstance(parameters_split, Mapping):
        sizes = {f"{name.rstrip('_')}_": size for name, size in parameters_split.items()}
    else:
        even = out_features // len(parameters_split)
        sizes = {f"{name.rstrip('_')}_": even for name in parameters_split}
        require(len(sizes) == len(parameters_split), "parameters_split names a parameter twice")
    total = sum(sizes.values())
    require(total == out_features, f"parameters_split adds up to {total} rows, not out_features={out_features}")
    return sizes


class SplitWeights(TwinModule):
    """What te.Linear and te.LayerNormLinear share: ``{prefix}weight`` and ``{prefix}bias`` in row blocks, used as one matrix."""

    in_features: int
    out_features: int
    use_bias: bool
    return_bias: bool

    def _add_weights(
        self,
        parameters_split: ParametersSplit | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        """Register the row blocks: all weights first, then all biases, as TE orders them."""
        sizes = split_sizes(self.out_features, parameters_split)
        self.weight_names = [f"{prefix}weight" for prefix in sizes]
        self.bias_names = [f"{prefix}bias" for prefix in sizes]
        for name, rows in zip(self.weight_names, sizes.values(), strict=True):
            self.register_parameter(name, empty_weight(rows, self.in_features, dtype, device))
        for name, rows in zip(self.bias_names, sizes.values(), strict=True):
            bias = nn.Parameter(torch.zeros(rows, dtype=dtype, device=device)) if self.use_bias else None
            self.register_parameter(name, bias)

    def _joined(self, names: Sequence[str]) -> Tensor:
        blocks: list[Tensor] = [getattr(self, name) for name in names]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def _project(self, inp: Tensor) -> tuple[Tensor, Tensor | None]:
        """[..., in_features] → [..., out_features] and the bias [out_features] that was left out, if ``return_bias``."""
        bias = self._joined(self.bias_names) if self.use_bias else None
        if not self.return_bias:
            return linear(self, inp, self._joined(self.weight_names), bias), None
        return linear(self, inp, self._joined(self.weight_names), None), None if bias is None else bias.to(inp.dtype)

    def extra_repr(self) -> str:
        """Constructor facts for printing."""
        blocks = "" if len(self.weight_names) == 1 else f", weights={'+'.join(self.weight_names)}"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}{blocks}"


class Projection(SplitWeights):
    """te.Linear with ``parameters_split`` and ``return_bias``: ``y = x @ weight.T + bias``.

    Unlike te.Linear, it accepts a split on the meta device, where TE asserts.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        bias: whether there is a bias.
        return_bias: leave the bias out and return it beside the output; None stands for no bias.
        parameters_split: names of row blocks, with or without their sizes; see :func:`split_sizes`.
        params_dtype: dtype of the parameters; torch's default dtype when None.
        device: device of the parameters; "meta" allocates nothing.

    Shapes: input [..., in_features]; weights stack to [out_features, in_features]; output [..., out_features].
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        return_bias: bool = False,
        parameters_split: ParametersSplit | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        self._add_weights(parameters_split, params_dtype, device)

    def forward(self, inp: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """Input [..., in_features] → output [..., out_features], with the bias beside it if ``return_bias``."""
        out, bias = self._project(activation_input(inp, self))
        return (out, bias) if self.return_bias else out
