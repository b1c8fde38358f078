"""A small ``transformer_engine.pytorch`` with the constructor signatures of real versions, computing with torch on the CPU.

Signatures as in Transformer Engine 2.0 and 2.20: Linear's third positional argument is ``sequence_parallel``, the norms take the
rest of their arguments as ``**kwargs``, ``device`` defaults to "cuda", and only the string "meta" defers the allocation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

STATE: dict[str, Any] = {"enabled": False, "recipe": None, "seen": [], "calls": []}


def _device(device: Any) -> str:
    if device != "meta":
        raise RuntimeError("TransformerEngine needs CUDA.")
    return "meta"


class _Base(nn.Module):
    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        if state is not None and state.numel():
            raise RuntimeError("pickled state")

    def _log(self) -> None:
        STATE["seen"].append((type(self).__name__, STATE["enabled"]))


class Linear(_Base):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[torch.Tensor], None] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: tuple[str, ...] | None = None,
        device: Any = "cuda",
        ub_name: str | None = None,
    ) -> None:
        super().__init__()
        assert sequence_parallel is False
        assert params_dtype is not None
        self.use_bias, self.in_features, self.out_features, self.init_method = bias, in_features, out_features, init_method
        place = _device(device)
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=place))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=params_dtype, device=place))
        else:
            self.bias = torch.Tensor()  # type: ignore[assignment]

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        self._log()
        if inp.dtype != self.weight.dtype and not torch.is_autocast_enabled("cpu"):
            raise TypeError("Data types for parameters must match when outside of autocasted region.")
        rows = inp.reshape(-1, inp.shape[-1])
        out = functional.linear(rows, self.weight, self.bias if self.use_bias else None)
        return out.view(-1, out.shape[-1]) if inp.dim() == 1 else out.view(*inp.shape[:-1], out.shape[-1])


class _Norm(_Base):
    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if params_dtype is not None or hidden_size is not None:
            raise DeprecationWarning("params_dtype and hidden_size are deprecated")
        unknown = set(kwargs) - {"device", "dtype"}
        if unknown:
            raise TypeError(f"unexpected keyword arguments {unknown}")
        self.normalized_shape, self.eps, self.zero_centered_gamma = (normalized_shape,), eps, zero_centered_gamma
        place, dtype = _device(kwargs.get("device", "cuda")), kwargs.get("dtype")
        self.weight = nn.Parameter(torch.empty(normalized_shape, dtype=dtype, device=place))  # type: ignore[arg-type]
        if isinstance(self, LayerNorm):
            self.bias = nn.Parameter(torch.empty(normalized_shape, dtype=dtype, device=place))  # type: ignore[arg-type]

    def _gamma(self) -> torch.Tensor:
        return self.weight.float() + (1 if self.zero_centered_gamma else 0)


class LayerNorm(_Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._log()
        wide = functional.layer_norm(x.float(), self.normalized_shape, self._gamma(), self.bias.float(), self.eps)  # type: ignore[arg-type]
        return wide.to(self.weight.dtype)


class RMSNorm(_Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._log()
        wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps) * self._gamma()
        return wide.to(self.weight.dtype)


@contextmanager
def _entered(enabled: bool, recipe: Any) -> Any:
    before = (STATE["enabled"], STATE["recipe"])
    STATE["enabled"], STATE["recipe"] = enabled, recipe if enabled else before[1]
    try:
        yield
    finally:
        STATE["enabled"], STATE["recipe"] = before


def autocast(enabled: bool = True, calibrating: bool = False, recipe: Any = None, amax_reduction_group: Any = None) -> Any:
    STATE["calls"].append("autocast")
    return _entered(enabled, recipe)


def fp8_autocast(enabled: bool = True, calibrating: bool = False, fp8_recipe: Any = None, fp8_group: Any = None) -> Any:
    STATE["calls"].append("fp8_autocast")
    return _entered(enabled, fp8_recipe)


class DelayedScaling: ...


class Float8CurrentScaling: ...


class MXFP8BlockScaling: ...


def install(monkeypatch: pytest.MonkeyPatch, version: str = "2.20") -> ModuleType:
    """Put the fake in ``sys.modules``, and let the choice of a backend say that it can run here."""
    from te_convert.rewrite import site
    from te_convert.runtime import backend

    STATE.update(enabled=False, recipe=None, seen=[], calls=[])
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.common", "transformer_engine.common.recipe")
    package, te, common, recipe = (ModuleType(name) for name in names)
    for module in (package, te, common, recipe):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    fake: Any = te
    package.pytorch, package.common, common.recipe = te, common, recipe  # type: ignore[attr-defined]
    for cls in (Linear, LayerNorm, RMSNorm):
        setattr(fake, cls.__name__, cls)
    fake.fp8_autocast = fp8_autocast
    recipe.DelayedScaling = DelayedScaling  # type: ignore[attr-defined]
    if version != "2.0":
        fake.autocast = autocast
        fake.get_default_recipe = lambda: Float8CurrentScaling()
        recipe.Float8CurrentScaling = Float8CurrentScaling  # type: ignore[attr-defined]
        recipe.MXFP8BlockScaling = MXFP8BlockScaling  # type: ignore[attr-defined]
    monkeypatch.setattr(backend, "_why_not_te", lambda device_type: "")
    for name in ("TELinear", "TELayerNorm", "TERMSNorm"):
        monkeypatch.setattr(site, name, None, raising=False)  # made by the test, and gone after it
    monkeypatch.setattr(site, "_CLASSES", {key: value for key, value in site._CLASSES.items() if key[0] != "te"})
    return te
