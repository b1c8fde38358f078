"""A mixture whose experts are modules: its own gate, then the proved router and grouped products; else its own forward."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from te_convert.facts.experts import argument_names
from te_convert.facts.routers import route
from te_convert.match.torch_layers import has_hooks
from te_convert.replacements.specs import GroupedExpertsSpec, Routing, torch_dtype
from te_convert.rewrite.fused import RECORDS, FusedRecord, Inputs
from te_convert.rewrite.lazy import can_defer, unwrap
from te_convert.rewrite.loans import Borrower

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@dataclass(eq=False)
class MixtureRecord(FusedRecord):
    """What the grouped experts inside a mixture know about it.

    Attributes:
        settings: numbers, flags and strings of every member as they were when its forward was proved.
    """

    settings: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.settings = self._settings_now()

    @property
    def owner(self) -> Any:
        """The mixture."""
        return self.members[0][1]

    @property
    def routing(self) -> Routing:
        """How it chooses experts."""
        spec = self.decision.spec
        assert isinstance(spec, GroupedExpertsSpec)
        assert spec.routing is not None
        return spec.routing

    def intact(self) -> bool:
        """False when a part was replaced, hooked or got another forward, or an attribute changed, after the conversion."""
        prefix = f"{self.decision.scope}." if self.decision.scope else ""
        for (_, part), member in zip(self.members[1:], self.decision.members[1:], strict=True):
            found: Any = self.owner
            for name in member.fqn.removeprefix(prefix).split("."):
                found = found._modules.get(name) if found is not None else None
            if found is not part or "forward" in part.__dict__ or has_hooks(part):
                return False
        return self.settings == self._settings_now()

    def _settings_now(self) -> list[dict[str, Any]]:
        return [_settings(module) for _, module in self.members]

    def input_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The one tensor of a call that the proof covers, or None."""
        if len(args) + len(kwargs) != 1 or not kwargs.keys() <= set(argument_names(self.owner._te_base)[:1]):
            return None
        (x,) = map(unwrap, (*args, *kwargs.values()))
        fits = can_defer(x) and x.dim() == self.routing.dims and x.numel() > 0
        noisy = self.routing.eval_only and any(module.training for _, module in self.members)
        return x if fits and not noisy and self.intact() else None

    def logits_of(self, x: Tensor) -> Tensor:
        """What the mixture's own gate computes for its input."""
        logits: Tensor = self.owner.get_submodule(self.routing.gate)(x.reshape(-1, x.shape[-1]) if self.routing.flat else x)
        return logits

    def compute(self, x: Tensor, logits: Tensor) -> Tensor:
        """Router and grouped products: output of the shape of ``x``."""
        tokens = x.reshape(-1, x.shape[-1])
        weights, index = route(logits.reshape(len(tokens), -1), self.routing.router, self.routing.top_k)
        te_forward: Any = self.module.te_forward
        y: Tensor = te_forward(tokens, index, weights.to(x.dtype))
        return y.reshape(x.shape)

    def run_again(self, inputs: Inputs) -> Tensor:
        """Router and grouped products once more, for the same logits."""
        return self.compute(*inputs[0])

    def run_original(self, inputs: Inputs, own: Any = None) -> Tensor:
        """The mixture's own forward for the same logits: its gate is a site of its own, which may not run in this dtype."""
        x, logits = inputs[0]
        held, name = self.owner._modules, self.routing.gate
        gate = held[name]
        held[name] = _Answer(gate, logits)
        try:
            with self.off(own):
                y = self.owner.eager(x)
        finally:
            held[name] = gate
        out: Tensor = y[0] if isinstance(y, tuple) else y
        return out

    def sample_inputs(self) -> Inputs | None:
        """Seeded random tokens and logits, for a site that no run reached."""
        spec: Any = self.decision.spec
        generator, like = torch.Generator().manual_seed(0), next(self.module.parameters())
        x = torch.randn((2, 5, spec.hidden_size)[-self.routing.dims :], generator=generator, dtype=torch.float32)
        logits = torch.randn((*x.shape[:-1], spec.num_gemms), generator=generator, dtype=torch.float32)
        logits = logits.flatten(0, -2) if self.routing.flat else logits
        dtype = torch_dtype(spec.dtype)
        return ((x.to(like.device, dtype), logits.to(like.device, dtype)), {})

    def __deepcopy__(self, memo: Any) -> MixtureRecord:
        new = MixtureRecord(self.decision, nn.Module(), nn.Module(), self.backend, enabled=self.enabled)
        memo[id(self)] = new
        new.module, new.scope = copy.deepcopy(self.module, memo), copy.deepcopy(self.scope, memo)
        new.members, new.settings = copy.deepcopy(self.members, memo), copy.deepcopy(self.settings, memo)
        new.switches = copy.deepcopy(self.switches, memo)
        return new


class _Answer(nn.Module):
    """Stands for the gate where its logits are known."""

    def __init__(self, gate: nn.Module, logits: Tensor) -> None:
        super().__init__()
        self.__dict__.update(gate=gate, logits=logits)

    def forward(self, *_: Any) -> Tensor:
        """The logits."""
        logits: Tensor = self.__dict__["logits"]
        return logits.clone()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["gate"], name)


def _settings(module: nn.Module) -> dict[str, Any]:
    values = vars(module).items()
    own = {name: value for name, value in values if name not in _OF_EVERY_MODULE and not name.startswith("_te_convert")}
    return {name: value for name, value in own.items() if isinstance(value, (bool, int, float, str, type(None)))}


class MixtureForward(Borrower):
    """A mixture whose grouped experts run where its forward was proved."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the original."""
        record: MixtureRecord = self.__dict__[RECORDS]
        x = record.input_of(args, kwargs) if record.enabled else None
        if x is None:
            record.fallbacks += record.enabled
            return self.eager(*args, **kwargs)
        logits = record.logits_of(x)
        y = record.compute(x, logits)
        record.ran(((x, logits), {}), y)
        return (y, logits) if record.routing.logits else y
