"""One site at a time: build a module, run it (or not), and see what the plan says about it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from te_convert.capture.graph import Capture
from te_convert.capture.run import capture
from te_convert.capture.scenario import normalize_inputs
from te_convert.config import ConvertConfig
from te_convert.match.leaves import LeafPolicy
from te_convert.plan.choose import make_plan
from te_convert.plan.model import Decision, Plan


class Holder(nn.Module):
    """Calls ``self.site`` on its input unless another forward is given."""

    def __init__(self, site: nn.Module, run: Callable[..., Any] | None = None, **modules: nn.Module) -> None:
        super().__init__()
        self.site = site
        for name, module in modules.items():
            self.add_module(name, module)
        self.run = run

    def forward(self, *args: Any) -> Any:
        return self.site(*args) if self.run is None else self.run(self, *args)


def plan_of(model: nn.Module, inputs: Any = None, **options: Any) -> Plan:
    """The plan of a model that runs on ``inputs``; without them nothing is recorded."""
    scenarios = normalize_inputs(inputs)
    found = capture(model, scenarios, LeafPolicy()) if scenarios else Capture()
    assert found.failures == ()
    return make_plan(model, found, ConvertConfig(**options))


def decide(site: nn.Module, inputs: Any = None, run: Callable[..., Any] | None = None, **options: Any) -> Decision:
    """What the plan says about ``site`` inside a model."""
    modules = options.pop("modules", {})
    return plan_of(Holder(site, run, **modules), inputs, **options).get("site")


def codes(decision: Decision) -> list[str]:
    return [reason.code for reason in decision.reasons]


def x_like(width: int = 6, dtype: torch.dtype = torch.float32, rows: int = 3) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).to(dtype)


def build(path: str, *args: Any, **kwargs: Any) -> nn.Module:
    """An instance of ``package.module:Class``."""
    module, name = path.split(":")
    made: nn.Module = getattr(importlib.import_module(module), name)(*args, **kwargs)
    return made


class Wrapped(torch.Tensor):
    """A tensor subclass that does nothing."""
