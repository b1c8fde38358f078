"""Dtypes of the fused modules, and the normalisation inside them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_convert.reference.module import compute_dtype, without_autocast
from te_convert.reference.unsupported import require

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Autocast's dtype on the device of ``x``, or None outside autocast."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def activation_input(inp: Tensor, module: nn.Module) -> Tensor:
    """The input in the dtype in which a fused module computes: autocast's, else its own.

    Raises:
        TypeError: outside autocast, a parameter of another dtype, as TE's base module (``module/base.py``).  Not asked under a
            torch-function mode, which may be what changes the dtypes (parity in a wider precision).
    """
    dtype = autocast_dtype(inp)
    if dtype is not None:
        return inp.to(dtype)
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.dtype != inp.dtype and not torch._C._len_torch_function_stack():
            raise TypeError(f"the input is {inp.dtype} and {name} is {parameter.dtype}; outside autocast they must be the same")
    return inp


def add_norm_parameters(
    module: nn.Module,
    size: int,
    *,
    normalization: str,
    zero_centered_gamma: bool,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> None:
    """Register ``layer_norm_weight`` [size] and, for LayerNorm, ``layer_norm_bias`` [size].

    Raises:
        NotSupportedError: neither LayerNorm nor RMSNorm.
    """
    require(normalization in NORMALIZATIONS, f"normalization {normalization!r} is none of {', '.join(NORMALIZATIONS)}")
    start = torch.zeros if zero_centered_gamma else torch.ones
    module.register_parameter("layer_norm_weight", nn.Parameter(start(size, dtype=dtype, device=device)))
    bias = nn.Parameter(torch.zeros(size, dtype=dtype, device=device)) if normalization == "LayerNorm" else None
    module.register_parameter("layer_norm_bias", bias)


def normalize(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, normalization: str, zero_centered_gamma: bool
) -> Tensor:
    """LayerNorm or RMSNorm over the last dimension, in float32, rounded once to the dtype of ``x``.

    Args:
        x: [..., n].
        weight: [n]; ``1 + weight`` is used when ``zero_centered_gamma``.
        bias: [n] for LayerNorm, None for RMSNorm.
        eps: added to the variance or to the mean square.
        normalization: "LayerNorm" or "RMSNorm".
        zero_centered_gamma: whether ``weight`` is kept minus one.

    Returns:
        [..., n].
    """
    wide = compute_dtype(x.dtype)
    if x.dtype is wide is weight.dtype and not zero_centered_gamma and autocast_dtype(x) is None:  # nothing to cast
        if normalization == "RMSNorm":
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
    with without_autocast(x):
        # Under autocast TE casts the parameters to the activation dtype before its kernel widens them.
        gamma = weight.to(x.dtype).to(wide) + (1 if zero_centered_gamma else 0)
        values = x.to(wide)
        if normalization == "RMSNorm":
            y = F.rms_norm(values, (x.shape[-1],), gamma, eps)
        else:
            beta = None if bias is None else bias.to(x.dtype).to(wide)
            y = F.layer_norm(values, (x.shape[-1],), gamma, beta, eps)
        return y.to(x.dtype)


def empty_weight(rows: int, columns: int, dtype: torch.dtype | None, device: torch.device | str | None) -> nn.Parameter:
    """A weight [rows, columns] with TE's default initialisation; nothing is drawn on the meta device."""
    weight = nn.Parameter(torch.empty(rows, columns, dtype=dtype, device=device))
    if not weight.is_meta:
        nn.init.normal_(weight, 0.0, 0.023)
    return weight
