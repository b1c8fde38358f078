"""Transformer Engine's CUDA kernels as torch code: signatures of ``transformer_engine_torch`` 2.20, in high precision only.

Formulas are those of TE's sources (``common/util/math.h``, ``common/util/vectorized_pointwise.h``, ``common/normalization``) and
share no code with the twins, which are compared with them.  Everything is computed in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[..., Any]


def _plain(quantizer: Any) -> None:
    assert quantizer is None, "the stand-ins know no quantisers"


def _dtype(te_dtype: Any, default: torch.dtype) -> torch.dtype:
    """A torch dtype for TE's own, which comes as its C++ enumeration."""
    if te_dtype is None or isinstance(te_dtype, torch.dtype):
        return te_dtype or default
    from transformer_engine.pytorch.constants import TE_DType

    found: torch.dtype = next(key for key, value in TE_DType.items() if int(value) == int(te_dtype))
    return found


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).float()


# --- matrix products -----------------------------------------------------------------------------------------------------------


def generic_gemm(
    a: Tensor,
    transpose_a: bool,
    b: Tensor,
    transpose_b: bool,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    *workspace_and_accumulate: Any,
    alpha: float = 1.0,
    extra_output: Tensor | None = None,
    **overlap: Any,
) -> tuple[Tensor, Tensor | None, None, Tensor | None]:
    """``op(b) @ op(a)``, rows first; a ``bias`` is added, or its gradient summed up where ``grad``.

    With a weight ``a`` [out, in], "TN" is a forward and "NN" the gradient of its input; with an input ``a``, "NT" is the gradient
    of the weight.
    """
    _plain(quantizer)
    assert not gelu
    assert overlap.get("comm_overlap") is None
    _, _, accumulate, _ = workspace_and_accumulate
    left, right = _rows(b), _rows(a)
    product = (left.T if transpose_b else left) @ (right.T if transpose_a else right) * alpha
    bias_gradient = None
    if bias is not None and bias.numel():
        if grad:
            bias_gradient = left.sum(0).to(bias.dtype)
        else:
            product = product + bias.float()
    if not transpose_b:
        product = product.reshape(*b.shape[:-1], product.shape[-1])
    return _write(product.to(_dtype(out_dtype, a.dtype)), out, accumulate), bias_gradient, None, extra_output


def _write(value: Tensor, out: Tensor | None, accumulate: bool) -> Tensor:
    if out is None:
        return value
    return out.add_(value.view_as(out)) if accumulate else out.copy_(value.view_as(out))


def te_general_grouped_gemm(
    a: Sequence[Tensor],
    transpose_a: bool,
    b: Sequence[Tensor],
    transpose_b: bool,
    out: Sequence[Tensor],
    out_dtype: Any,
    m_splits: Sequence[int] | None,
    bias: Sequence[Tensor],
    bias_dtype: Any,
    single_output: bool,
    gelu_in: Any,
    grad: bool,
    workspaces: Any,
    workspace_size: int,
    accumulate: bool,
    *rest: Any,
) -> Sequence[Tensor]:
    """:func:`generic_gemm` for each group, into ``out``: one tensor for all groups in turn, or one each."""
    if single_output:
        assert m_splits is not None
        out = out[0].split(list(m_splits))
    gradients: list[Tensor] = []
    for left, right, into, offset in zip(a, b, out, bias, strict=True):
        options = (None, out_dtype, offset, bias_dtype, False, None, grad, workspaces, workspace_size, accumulate, False)
        _, gradient, *_ = generic_gemm(left, transpose_a, right, transpose_b, into, *options)
        gradients.append(offset if gradient is None else gradient)
    return gradients if grad else bias


# --- norms ---------------------------------------------------------------------------------------------------------------------


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def layernorm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Any, quantizer: Any, otype: Any, sm_margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, mean and reciprocal standard deviation."""
    _plain(quantizer)
    wide = x.float()
    mean = wide.mean(-1)
    scale = (wide.var(-1, correction=0) + eps).rsqrt()
    y = (wide - mean.unsqueeze(-1)) * scale.unsqueeze(-1) * _gamma(weight, zero_centered) + bias.float()
    return _write(y.to(_dtype(otype, x.dtype)), out, accumulate=False), mean, scale


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Any, quantizer: Any, otype: Any, sm_margin: int, zero_centered: bool
) -> tuple[Tensor, None, Tensor]:
    """Output, no mean, and the reciprocal root mean square."""
    _plain(quantizer)
    wide = x.float()
    scale = (wide.square().mean(-1) + eps).rsqrt()
    y = wide * scale.unsqueeze(-1) * _gamma(weight, zero_centered)
    return _write(y.to(_dtype(otype, x.dtype)), out, accumulate=False), None, scale


def layernorm_bwd(
    dy: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, weight and bias."""
    normed = (x.float() - mean.unsqueeze(-1)) * scale.unsqueeze(-1)
    inner = dy.float() * _gamma(weight, zero_centered)
    projected = inner.mean(-1, keepdim=True) + normed * (inner * normed).mean(-1, keepdim=True)
    dx = (inner - projected) * scale.unsqueeze(-1)
    return dx.to(x.dtype), _rows(dy.float() * normed).sum(0).to(weight.dtype), _rows(dy).sum(0).to(weight.dtype)


def rmsnorm_bwd(dy: Tensor, x: Tensor, scale: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """Gradients of input and weight."""
    normed = x.float() * scale.unsqueeze(-1)
    inner = dy.float() * _gamma(weight, zero_centered)
    dx = (inner - normed * (inner * normed).mean(-1, keepdim=True)) * scale.unsqueeze(-1)
    return dx.to(x.dtype), _rows(dy.float() * normed).sum(0).to(weight.dtype)


# --- activations ---------------------------------------------------------------------------------------------------------------


def _tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu(x: Tensor) -> Tensor:
    return x.clamp(min=0)


def _squared_relu(x: Tensor) -> Tensor:
    return x.clamp(min=0) ** 2


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _gated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The first half is activated, the second one multiplies."""

    def gated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return function(first) * second

    return gated


def _clamped_swiglu(x: Tensor, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0) -> Tensor:
    gate, linear = x.chunk(2, dim=-1)
    gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (linear + glu_linear_offset)


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "gelu": _tanh_gelu,
    "geglu": _gated(_tanh_gelu),
    "glu": _gated(torch.sigmoid),
    "qgelu": _quick_gelu,
    "qgeglu": _gated(_quick_gelu),
    "relu": _relu,
    "reglu": _gated(_relu),
    "srelu": _squared_relu,
    "sreglu": _gated(_squared_relu),
    "silu": _silu,
    "swiglu": _gated(_silu),
    "clamped_swiglu": _clamped_swiglu,
}
"""By TE's names; all twelve."""


def _forward_kernel(function: Callable[..., Tensor]) -> Kernel:
    def forward(x: Tensor, quantizer: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        _plain(quantizer)
        return function(x.float(), *args, **kwargs).to(x.dtype)

    return forward


def _backward_kernel(function: Callable[..., Tensor]) -> Kernel:
    def backward(dy: Tensor, x: Tensor, quantizer: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        _plain(quantizer)
        with torch.enable_grad():
            wide = x.detach().float().requires_grad_()
            (dx,) = torch.autograd.grad(function(wide, *args, **kwargs), wide, dy.float())
        return dx.to(x.dtype)

    return backward


def _backward_name(activation: str) -> str:
    return "clamped_dswiglu" if activation == "clamped_swiglu" else f"d{activation}"


KERNELS: dict[str, Kernel] = {
    "generic_gemm": generic_gemm,
    "te_general_grouped_gemm": te_general_grouped_gemm,
    "layernorm_fwd": layernorm_fwd,
    "layernorm_bwd": layernorm_bwd,
    "rmsnorm_fwd": rmsnorm_fwd,
    "rmsnorm_bwd": rmsnorm_bwd,
    **{name: _forward_kernel(function) for name, function in ACTIVATIONS.items()},
    **{_backward_name(name): _backward_kernel(function) for name, function in ACTIVATIONS.items()},
    "get_num_cublas_streams": lambda: 1,
}
"""Stand-ins by their names in ``transformer_engine_torch``."""
