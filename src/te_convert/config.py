"""Options of a conversion, checked once at the border."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from te_convert.errors import InputError

BackendChoice = Literal["auto", "te", "reference"]
Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total) as a conversion advances."""

DTYPES = ("float32", "bfloat16", "float16")
"""What a streamed conversion can write floating-point tensors in."""
BACKENDS = ("auto", "te", "reference")
APPROXIMATIONS = ("gelu-tanh",)
POLICIES = ("none", "benefit")
"""What decides over a site's precision beside alignment and accuracy: nothing, or the predicted time."""


@dataclass(frozen=True)
class Alignment:
    """Multiples that a recipe asks of a GEMM's dimensions for training (forward and backward).

    Source: TE 2.20 ``pytorch/utils.py::assert_dim_for_fp8_exec`` (leading %8, last %16 for every recipe), cuBLASLt's leading
    dimension %16 for delayed and current scaling in backward, MXFP8's 32-element blocks, NVFP4's kernels.
    """

    rows: int
    features: int


RECIPES: dict[str, Alignment | None] = {
    "bf16": None,
    "fp8": Alignment(32, 32),  # the GPU decides which: the strictest of them
    "fp8-delayed": Alignment(16, 16),
    "fp8-current": Alignment(16, 16),
    "fp8-block": Alignment(16, 16),
    "mxfp8": Alignment(32, 32),
    "nvfp4": Alignment(32, 32),
}


@dataclass(frozen=True)
class ConvertConfig:
    """What :func:`te_convert.convert` was asked for.

    Raises:
        InputError: an unknown recipe, backend, policy or approximation, a pattern that is no string, or a bound that is no number.
    """

    recipe: str | None = None
    backend: str = "auto"
    fuse: bool = True
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    inplace: bool = False
    allow: tuple[str, ...] = ()
    verify: bool = True
    strict: bool = False
    min_sqnr: float | None = None
    bisect: bool = False
    policy: str = "none"
    gpu: str | None = None
    tokens: int | None = None
    progress: Progress | None = field(default=None, compare=False)
    tp_mesh: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        self._check_kinds()
        if self.recipe is not None and self.recipe not in tuple(RECIPES):
            raise InputError(f"unknown recipe {self.recipe!r}", f"use None or one of {', '.join(RECIPES)}")
        if self.backend not in BACKENDS:
            raise InputError(f"unknown backend {self.backend!r}", f"use one of {', '.join(BACKENDS)}")
        if self.policy not in POLICIES:
            raise InputError(f"unknown policy {self.policy!r}", f"use one of {', '.join(POLICIES)}")
        bound: Any = self.min_sqnr
        if bound is not None and not (isinstance(bound, int | float) and math.isfinite(bound)):
            raise InputError(f"min_sqnr takes a finite number of dB, got {bound!r}", "pass for instance min_sqnr=20.0")
        for name in self.allow:
            if name not in APPROXIMATIONS:
                raise InputError(f"unknown approximation {name!r} in allow", f"known: {', '.join(APPROXIMATIONS)}")

    def _check_kinds(self) -> None:
        """``strict="no"`` would be true, and a callback that cannot be called would fail in the middle of the work."""
        for name in ("fuse", "inplace", "verify", "strict", "bisect"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} is True or False, got {getattr(self, name)!r}", f"pass {name}=True or {name}=False")
        if self.progress is not None and not callable(self.progress):
            raise InputError(f"progress is a function, got {self.progress!r}", "it is called with (stage, done, total)")

    @property
    def alignment(self) -> Alignment | None:
        """The recipe's alignment, or None in high precision."""
        return RECIPES[self.recipe] if self.recipe is not None else None

    def report_progress(self, stage: str, done: int, total: int) -> None:
        """Tell the caller's progress callback, if there is one."""
        if self.progress is not None:
            self.progress(stage, done, total)


class SitePatterns(TypedDict):
    """The options of every function that plans a conversion, as :class:`ConvertConfig` takes them."""

    include: tuple[str, ...]
    exclude: tuple[str, ...]
    allow: tuple[str, ...]


def patterns(include: str | Sequence[str], exclude: str | Sequence[str], allow: str | Sequence[str]) -> SitePatterns:
    """Normalise the arguments of those names to tuples of strings.

    Raises:
        InputError: no strings.
    """
    return {"include": _strings(include, "include"), "exclude": _strings(exclude, "exclude"), "allow": _strings(allow, "allow")}


def _strings(value: str | Sequence[str], name: str) -> tuple[str, ...]:
    given: Any = (value,) if isinstance(value, str) else value
    if not isinstance(given, Iterable):
        raise InputError(f"{name} takes strings, got {given!r}", "pass FQN glob patterns such as 'encoder.*.fc1'")
    items: tuple[str, ...] = tuple(given)
    for item in items:
        if not isinstance(item, str):
            raise InputError(f"{name} takes strings, got {item!r}", "pass FQN glob patterns such as 'encoder.*.fc1'")
    return items
