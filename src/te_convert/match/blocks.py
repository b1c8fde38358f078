"""What a block rule looks at: one module that may become one TE module with everything inside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn

from te_convert.capture.graph import Capture
from te_convert.facts.stand_in import kind_key
from te_convert.match.candidate import Candidate
from te_convert.match.groups import LinearSite, NormSite
from te_convert.match.guards import aligned_features

F = TypeVar("F")


@dataclass(frozen=True)
class Block:
    """One module with its surroundings.

    Attributes:
        site: the module with what was observed.
        modules: the model's modules by name.
        allow: approximations that the caller accepts.
        linears: every Linear of the model that a leaf rule would convert, by name.
        norms: every norm of the model that a leaf rule would convert, by name.
    """

    site: Candidate
    modules: dict[str, nn.Module]
    capture: Capture
    allow: tuple[str, ...] = ()
    linears: dict[str, LinearSite] = field(default_factory=dict)
    norms: dict[str, NormSite] = field(default_factory=dict)

    @property
    def is_meta(self) -> bool:
        """Parameters without values: nothing can be probed on them."""
        return any(parameter.is_meta for parameter in self.site.module.parameters())

    def tensor_calls(self) -> list[tuple[tuple[int, ...], ...]]:
        """Shapes of the tensor arguments of each recorded call; () for one of unknown origin."""
        return [tuple(_shape(node) for node in call.args) for call in self.site.calls]

    def cached(self, probe: Callable[[nn.Module], F]) -> F:
        """A probe's result, once for all modules of one kind."""
        key = ("block", kind_key(self.site.module))
        if key not in self.site.probe_cache:
            self.site.probe_cache[key] = probe(self.site.module)
        found: F = self.site.probe_cache[key]
        return found

    def cached_deep(self, probe: Callable[[], F]) -> F:
        """A probe's result, once for all modules that are of one kind with everything inside."""
        key = ("deep", tuple((name, kind_key(child)) for name, child in self.site.module.named_modules()))
        if key not in self.site.probe_cache:
            self.site.probe_cache[key] = probe()
        found: F = self.site.probe_cache[key]
        return found

    def precision(self, *features: int) -> str:
        """High precision ("high") when the recipe cannot take one of the dimensions."""
        return "high" if any(aligned_features(self.site, size, size) for size in features) else "recipe"


def _shape(node: Any) -> tuple[int, ...]:
    meta = None if node is None else node.meta.get("tensor_meta")
    return () if meta is None else tuple(meta.shape)
