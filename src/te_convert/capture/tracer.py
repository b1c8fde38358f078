"""A concrete torch.fx tracer: run the model once for real and write down what happened.

Symbolic tracing stops at the first ``if`` on a value or a shape; a real run does not.  A ``TorchFunctionMode`` sees every torch
call and a patched ``nn.Module.__call__`` sees every module call, so Python control flow, ``**kwargs`` and data-dependent sizes
are simply executed.  The result is evidence about one run (and an oracle at its shapes), never a program for other inputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from te_convert.capture.attention import watched_attention
from te_convert.capture.graph import Recording
from te_convert.capture.recorder import Recorder
from te_convert.capture.scenario import Scenario, exits_are_errors

LeafPolicy = Callable[[nn.Module], bool]

_ACTIVE = threading.local()
_PATCH_LOCK = threading.RLock()
"""One recording at a time: the patches are process-wide."""


class _RecordMode(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.recorder.function_call(func, args, kwargs or {})


def _current() -> Recorder | None:
    recorder: Recorder | None = getattr(_ACTIVE, "recorder", None)
    return recorder


def is_recording() -> bool:
    """True in a thread whose run is being recorded."""
    return _current() is not None


@contextmanager
def _patched(recorder: Recorder) -> Iterator[None]:
    """Route module calls and autograd Functions of this thread through the recorder; other threads' module calls are noted."""
    with _PATCH_LOCK:
        module_call = nn.Module.__call__
        function_apply = torch.autograd.Function.__dict__["apply"]

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if _current() is None:
                return recorder.unseen_call(module, module_call, args, kwargs)
            return recorder.module_call(module, module_call, args, kwargs)

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            original = function_apply.__get__(None, cls)
            if _current() is None:
                return original(*args, **kwargs)
            return recorder.autograd_function(cls, original, args, kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign]
        torch.autograd.Function.apply = classmethod(apply)
        previous = _current()
        _ACTIVE.recorder = recorder
        try:
            yield
        finally:
            _ACTIVE.recorder = previous
            nn.Module.__call__ = module_call  # type: ignore[method-assign]
            torch.autograd.Function.apply = function_apply


class ConcreteTracer(fx.Tracer):
    """A ``torch.fx.Tracer`` whose :meth:`trace` executes the model on concrete inputs.

    Args:
        leaf: which modules become one ``call_module`` node; others are traced into.
    """

    def __init__(self, leaf: LeafPolicy) -> None:
        super().__init__()
        self._leaf = leaf

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """True when the module becomes one ``call_module`` node."""
        return self._leaf(m)

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Record one run of ``root(**concrete_args)`` and return its graph.

        Raises:
            TypeError: ``root`` is not a module.
        """
        if not isinstance(root, nn.Module):
            raise TypeError(f"ConcreteTracer traces nn.Module, got {type(root).__name__}")
        return self.record(root, Scenario("inputs", (), concrete_args or {})).graph

    def record(self, model: nn.Module, scenario: Scenario, fake: dict[str, torch.Tensor] | None = None) -> Recording:
        """Record one scenario; see :class:`~te_convert.capture.graph.Recording`.

        Args:
            model: run as it is, in its current mode; callers restore state (``preserve_model``).
            scenario: how to call it.
            fake: fake tensors standing in for every parameter and buffer, for models whose weights are on meta.

        Raises:
            Exception: whatever the model raises on these inputs.
        """
        recorder = Recorder(model, self._leaf, fake)
        args, kwargs = recorder.begin(scenario)
        with torch.no_grad(), _patched(recorder), watched_attention(_current), _RecordMode(recorder), exits_are_errors():
            output = model(*args, **kwargs) if fake is None else torch.func.functional_call(model, fake, args, kwargs)
        return recorder.finish(scenario, output)
