"""Convert PyTorch models to NVIDIA Transformer Engine, and prove that they compute the same numbers.

``import te_convert`` imports nothing heavy; the functions below load :mod:`te_convert.api` (and torch) on first use.
"""

from __future__ import annotations

import sys
from importlib import import_module, metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from te_convert.api import Explanation as Explanation
    from te_convert.api import Result as Result
    from te_convert.api import (
        analyze,
        autocast,
        convert,
        convert_checkpoint,
        estimate,
        explain,
        export,
        fallbacks,
        load,
        load_original_state_dict,
        materialize,
        open_model,
        original_state_dict,
        remap_optimizer,
        revert,
        save,
        te_state_dict,
        verify,
    )
    from te_convert.bench.model import BenchResult as BenchResult
    from te_convert.bench.run import bench
    from te_convert.estimate.model import Estimate as Estimate
    from te_convert.plan.model import Plan as Plan
    from te_convert.report.model import Report as Report
    from te_convert.runtime.doctor import doctor
    from te_convert.verify.model import Parity as Parity

__all__ = [
    "BenchResult",
    "Estimate",
    "Explanation",
    "Parity",
    "Plan",
    "Report",
    "Result",
    "__version__",
    "analyze",
    "autocast",
    "bench",
    "convert",
    "convert_checkpoint",
    "doctor",
    "estimate",
    "explain",
    "export",
    "fallbacks",
    "load",
    "load_original_state_dict",
    "materialize",
    "open_model",
    "original_state_dict",
    "remap_optimizer",
    "revert",
    "save",
    "te_state_dict",
    "verify",
]

try:
    __version__ = metadata.version("te_convert")
except metadata.PackageNotFoundError:  # run from a source tree that was not installed
    __version__ = "0.0.0+unknown"

_PLACES = {
    "BenchResult": "te_convert.bench.model",
    "Estimate": "te_convert.estimate.model",
    "Parity": "te_convert.verify.model",
    "Plan": "te_convert.plan.model",
    "Report": "te_convert.report.model",
    "doctor": "te_convert.runtime.doctor",  # works where torch does not import
}
_PACKAGES = {"bench": "te_convert.bench.run", "estimate": "te_convert.api", "explain": "te_convert.api", "verify": "te_convert.api"}
"""Functions that are called like a subpackage → the module that has them."""


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _PACKAGES:  # importing the subpackage binds it here, see _Package
        return import_module(f"te_convert.{name}")
    value = getattr(import_module(_PLACES.get(name, "te_convert.api")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _CallablePackage(ModuleType):
    """A subpackage, for instance ``te_convert.verify``, callable as the public function of the same name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function of that name, for instance :func:`te_convert.api.verify`."""
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module(_PACKAGES[name]), name)(*args, **kwargs)


class _Package(ModuleType):
    """Makes ``te_convert.verify`` and its like both the function and the subpackage, whichever is used first.

    The import system binds a subpackage as an attribute of its parent, which would hide a function of that name.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _PACKAGES and isinstance(value, ModuleType):
            value.__class__ = _CallablePackage
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
