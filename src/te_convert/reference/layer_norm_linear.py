"""Twin of te.LayerNormLinear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_convert.reference.parallel import enter_region, local_sizes, ranks_of
from te_convert.reference.precision import activation_input, add_norm_parameters, normalize
from te_convert.reference.projection import ParametersSplit, SplitWeights
from te_convert.reference.unsupported import require


class LayerNormLinear(SplitWeights):
    """``y = norm(x) @ weight.T + bias``: a norm over the last dimension and the Linear that reads it.

    Args:
        in_features: size of the last dimension of the input, over which it normalises.
        out_features: size of the last dimension of the output.
        eps: of the norm; 1e-5 for RMSNorm too.
        bias: whether the Linear has a bias.
        normalization: "LayerNorm" or "RMSNorm".
        return_bias: leave the bias out and return it; None stands for no bias.
        params_dtype: dtype of the parameters; torch's default dtype when None.
        return_layernorm_output: return the normalised input as well.
        parameters_split: names of row blocks of the weight, with or without their sizes: ``{name}_weight``, ``{name}_bias``.
        zero_centered_gamma: keep the norm's weight minus one.
        device: device of the parameters; "meta" allocates nothing.
        parallel_mode: None or "column", with ``tp_group`` and ``tp_size`` as of the twin of te.Linear.

    Shapes: input [..., in_features]; ``layer_norm_weight`` and, for LayerNorm, ``layer_norm_bias`` [in_features];
    ``weight`` [out_features, in_features]; ``bias`` [out_features]; output [..., out_features].

    Source: ``module/layernorm_linear.py``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        parameters_split: ParametersSplit | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        parallel_mode: str | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
    ) -> None:
        super().__init__()
        self.parallel_mode, self.tp_size = parallel_mode, ranks_of(tp_group, tp_size)
        self.tp_group = None if parallel_mode is None else tp_group
        require(parallel_mode in (None, "column"), f"parallel_mode {parallel_mode!r} is neither None nor 'column'")
        require(parallel_mode is None or parameters_split is None, "parameters_split is not supported with parallel_mode")
        in_features, out_features = local_sizes(in_features, out_features, parallel_mode, self.tp_size)
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        self.return_layernorm_output = return_layernorm_output
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        add_norm_parameters(
            self,
            in_features,
            normalization=normalization,
            zero_centered_gamma=zero_centered_gamma,
            dtype=params_dtype,
            device=device,
        )
        self._add_weights(parameters_split, params_dtype, device)

    layer_norm_weight: Tensor
    layer_norm_bias: Tensor | None

    def forward(self, inp: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        """Input [..., in_features] → output [..., out_features], or a tuple of output, bias and norm output, as asked for."""
        normed = normalize(
            activation_input(inp, self),
            self.layer_norm_weight,
            self.layer_norm_bias,
            eps=self.eps,
            normalization=self.normalization,
            zero_centered_gamma=self.zero_centered_gamma,
        )
        out, bias = self._project(enter_region(normed, self.tp_group))
        outputs: tuple[Tensor | None, ...] = (out,)
        if self.return_bias:
            outputs += (bias,)
        if self.return_layernorm_output:
            outputs += (normed,)
        return outputs if len(outputs) > 1 else out

    def extra_repr(self) -> str:
        """Constructor facts for printing."""
        return f"{super().extra_repr()}, {self.normalization}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"
