"""Twin of te.LayerNormMLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from te_convert.reference.activations import activate, check_activation, is_gated
from te_convert.reference.emulation import linear
from te_convert.reference.module import TwinModule
from te_convert.reference.parallel import enter_region, leave_region, ranks_of, share
from te_convert.reference.precision import activation_input, add_norm_parameters, empty_weight, normalize


class LayerNormMLP(TwinModule):
    """``y = activation(norm(x) @ fc1_weight.T + fc1_bias) @ fc2_weight.T + fc2_bias``; it always normalises.

    Args:
        hidden_size: size of the last dimension of input and output.
        ffn_hidden_size: size between the two Linears, after a gated activation has halved it.
        eps: of the norm; 1e-5 for RMSNorm too.
        bias: one flag for both Linears.
        return_bias: leave ``fc2_bias`` out and return it; None stands for no bias.
        normalization: "LayerNorm" or "RMSNorm".
        activation: TE's name; see :mod:`te_convert.reference.activations`.
        activation_params: of "clamped_swiglu": ``limit``, ``alpha``, ``glu_linear_offset``.
        params_dtype: dtype of the parameters; torch's default dtype when None.
        return_layernorm_output: return the normalised input as well.
        zero_centered_gamma: keep the norm's weight minus one.
        device: device of the parameters; "meta" allocates nothing.
        set_parallel_mode: fc1 is column-parallel and fc2 row-parallel, with ``tp_group`` and ``tp_size`` as of te.Linear's twin;
            each rank's fc1 has its part of both halves of a gated activation.

    Shapes: input and output [..., hidden_size]; ``layer_norm_weight`` and, for LayerNorm, ``layer_norm_bias`` [hidden_size];
    ``fc1_weight`` [ffn_hidden_size, hidden_size], or [2 * ffn_hidden_size, hidden_size] for a gated activation with the rows
    that it applies to first; ``fc2_weight`` [hidden_size, ffn_hidden_size]; biases by rows.

    Source: ``module/layernorm_mlp.py``.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        return_bias: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        set_parallel_mode: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
    ) -> None:
        super().__init__()
        check_activation(activation, activation_params)
        self.set_parallel_mode, self.tp_group = set_parallel_mode, tp_group if set_parallel_mode else None
        self.tp_size = ranks_of(tp_group, tp_size)
        ffn_hidden_size = share(ffn_hidden_size, self.tp_size) if set_parallel_mode else ffn_hidden_size
        self.use_bias, self.return_bias, self.return_layernorm_output = bias, return_bias, return_layernorm_output
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.activation, self.activation_params = activation, activation_params
        add_norm_parameters(
            self,
            hidden_size,
            normalization=normalization,
            zero_centered_gamma=zero_centered_gamma,
            dtype=params_dtype,
            device=device,
        )
        fc1_rows = 2 * ffn_hidden_size if is_gated(activation) else ffn_hidden_size
        for name, rows, columns in (("fc1", fc1_rows, hidden_size), ("fc2", hidden_size, ffn_hidden_size)):
            self.register_parameter(f"{name}_weight", empty_weight(rows, columns, params_dtype, device))
            offset = nn.Parameter(torch.zeros(rows, dtype=params_dtype, device=device)) if bias else None
            self.register_parameter(f"{name}_bias", offset)

    layer_norm_weight: Tensor
    layer_norm_bias: Tensor | None
    fc1_weight: Tensor
    fc1_bias: Tensor | None
    fc2_weight: Tensor
    fc2_bias: Tensor | None

    def forward(self, inp: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        """Input [..., hidden_size] → output of the same shape, or a tuple of output, bias and norm output, as asked for."""
        normed = normalize(
            activation_input(inp, self),
            self.layer_norm_weight,
            self.layer_norm_bias,
            eps=self.eps,
            normalization=self.normalization,
            zero_centered_gamma=self.zero_centered_gamma,
        )
        inner = linear(self, enter_region(normed, self.tp_group), self.fc1_weight, self.fc1_bias, "fc1")
        hidden = activate(self.activation, inner, self.activation_params)
        added = None if self.return_bias else self.fc2_bias
        if self.set_parallel_mode:
            out = leave_region(linear(self, hidden, self.fc2_weight, None, "fc2"), self.tp_group)
            out = out if added is None else out + added.to(out.dtype)
        else:
            out = linear(self, hidden, self.fc2_weight, added, "fc2")
        outputs: tuple[Tensor | None, ...] = (out,)
        if self.return_bias:
            outputs += (None if self.fc2_bias is None else self.fc2_bias.to(out.dtype),)
        if self.return_layernorm_output:
            outputs += (normed,)
        return outputs if len(outputs) > 1 else out

    def extra_repr(self) -> str:
        """Constructor facts for printing."""
        rows, columns = self.fc2_weight.shape
        sizes = f"hidden_size={rows}, ffn_hidden_size={columns}, bias={self.use_bias}, activation={self.activation}"
        return f"{sizes}, {self.normalization}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"
