"""Sites that leave Transformer Engine while the model runs: one whose TE module cannot work on this machine goes on as its twin.

Only what TE or a CUDA library says about the machine counts: no kernel for this GPU, no algorithm for this product, no attention
backend, a library that is loaded late and is not there.  The messages are those of TE 2.20 (``common/gemm/cublaslt_gemm.cu``,
``common/util/{cuda_runtime,rtc}.cpp``, ``pytorch/quantization.py``, ``pytorch/attention``) and of CUDA.  Everything else is raised
as it is: the caller's errors, such as a wrong shape; memory that ran out; and errors after which CUDA computes nothing any more.
A site is watched only where the choice of the backend was left to te_convert; ``backend="te"`` demands TE, so nothing is caught.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from te_convert.errors import FallbackWarning
from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.rewrite.fused import FusedRecord
from te_convert.rewrite.site import is_converted

Switch = Callable[[list[nn.Module], str], int]
"""``materialize.switch_modules``, handed in because it lives above this module."""

_OF_THE_MACHINE = re.compile(
    r"TransformerEngine needs CUDA"
    r"|[Dd]evice compute capability [\d.]+ or higher required"
    r"|is not supported on [\d.]+\+ architectures"
    r"|FP8 block scaled GEMM requires compute capability"
    r"|(?:CublasLt|Cuda) version [\d.x]+ or higher required"
    r"|No dot product attention backend is available"
    r"|Unable to find suitable cuBLAS (?:grouped )?GEMM algorithm"
    r"|CUBLAS_STATUS_(?:NOT_SUPPORTED|ARCH_MISMATCH|NOT_INITIALIZED)"
    r"|CUDNN_STATUS_(?:NOT_SUPPORTED|SUBLIBRARY_VERSION_MISMATCH)\w*"
    r"|NVRTC (?:library could not be loaded|support is not enabled|is disabled|Error)"
    r"|no kernel image is available for execution"
    r"|CUDA driver version is insufficient"
    r"|cannot open shared object file"
    r"|undefined symbol"
)
_AFTER_WHICH_NOTHING_WORKS = re.compile(
    r"out of memory|illegal memory access|device-side assert|unspecified launch failure|misaligned address|illegal instruction"
    r"|CUDA_ERROR_LAUNCH|ECC error",
    re.IGNORECASE,
)
_TYPES = (RuntimeError, ValueError, AssertionError, NotImplementedError, OSError, ImportError)


@dataclass(frozen=True)
class SiteFallback:
    """What did not run on the module that the plan gave it.

    Attributes:
        fqn: the site.
        replacement: TE's name of the module.
        cause: what Transformer Engine said, or that the fusion did not apply.
        calls: how often something else ran instead: the twin, or a member's original forward.
        on_twin: the site is a twin now; False for a fusion that some calls passed by.
    """

    fqn: str
    replacement: str
    cause: str
    calls: int
    on_twin: bool


class Guard:
    """Stands in front of a TE module's forward; after an error of the machine the module is its twin, and calls are counted."""

    def __init__(self, module: nn.Module, name: str, fqn: str, switch: Switch, told: set[str]) -> None:
        self.module, self.name, self.fqn, self.switch = module, name, fqn, switch
        self.told = told  # causes that the model warned of: hundreds of sites can leave for the same one
        self.cause, self.calls = "", 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """TE's forward, or the twin's."""
        if not self.cause:
            try:
                return self._forward(*args, **kwargs)
            except _TYPES as error:
                if not speaks_of_the_machine(error):
                    raise
                self._leave(error)
        self.calls += 1
        return self._forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(self.module), self.name)(self.module, *args, **kwargs)

    def _leave(self, error: BaseException) -> None:
        self.cause = " ".join(f"{type(error).__name__}: {error}".split())
        self.switch([self.module], "reference")
        if self.cause in self.told:
            return
        self.told.add(self.cause)
        where = self.fqn or "the root"
        what = f"{where} runs on its twin from now on, in high precision: {self.cause}"
        warnings.warn(f"{what}; te_convert.fallbacks(model) lists all such sites", FallbackWarning, stacklevel=2)


def speaks_of_the_machine(error: BaseException) -> bool:
    """Whether an error says that TE cannot do this here, and CUDA can still compute."""
    if isinstance(error, torch.cuda.OutOfMemoryError) or _AFTER_WHICH_NOTHING_WORKS.search(str(error)):
        return False
    return isinstance(error, ImportError) or _OF_THE_MACHINE.search(str(error)) is not None


def watch(model: nn.Module, switch: Switch) -> None:
    """Guard every site of a model that runs on TE."""
    unwatch(model)
    told: set[str] = set()
    for fqn, module in model.named_modules():
        if is_converted(module) and module.__dict__[SITE_ATTRIBUTE].backend == "te":
            name = _name_of_forward(module)
            module.__dict__[name] = Guard(module, name, fqn, switch, told)


def unwatch(model: nn.Module) -> None:
    """Take the guards away; sites that left TE stay twins."""
    for module in model.modules():
        if _guard(module) is not None:
            del module.__dict__[_name_of_forward(module)]


def fallbacks(model: nn.Module) -> list[SiteFallback]:
    """What did not run as planned since the model was converted, loaded or materialized, in module order; empty when all did.

    Args:
        model: a converted model.
    """
    found = []
    for fqn, module in model.named_modules():
        record = module.__dict__.get(SITE_ATTRIBUTE)
        if record is None:
            continue
        guard, name = _guard(module), record.decision.spec.name
        if guard is not None and guard.cause:
            found.append(SiteFallback(fqn, name, guard.cause, guard.calls, on_twin=True))
        if isinstance(record, FusedRecord) and record.fallbacks:
            cause = "a call that the fusion does not cover ran the original modules"
            found.append(SiteFallback(fqn, name, cause, record.fallbacks, on_twin=False))
    return found


def fallback_words(found: Sequence[SiteFallback]) -> tuple[str, ...]:
    """What did not run as planned, one sentence for each cause, with at most five sites by name."""
    causes: dict[tuple[bool, str], list[SiteFallback]] = {}
    for each in found:
        causes.setdefault((each.on_twin, each.cause), []).append(each)
    lines = []
    for (on_twin, cause), sites in causes.items():
        calls = sum(site.calls for site in sites)
        names = ", ".join(
            [*(f"{site.fqn or 'the root'} ({site.replacement})" for site in sites[:5]), *(["..."] if sites[5:] else [])]
        )
        what = "did not run on Transformer Engine but on twins" if on_twin else "did not run on the replacement"
        lines.append(f"{calls} call{'s' if calls != 1 else ''} of {names} {what}: {cause}")
    return tuple(lines)


def _name_of_forward(module: nn.Module) -> str:
    """The method that runs TE's module and nothing of the original's; attention has none but ``forward``."""
    return "te_forward" if hasattr(type(module), "te_forward") else "forward"


def _guard(module: nn.Module) -> Guard | None:
    found = module.__dict__.get(_name_of_forward(module))
    return found if isinstance(found, Guard) else None
