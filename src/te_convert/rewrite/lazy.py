"""A norm's output that is computed only when somebody needs its values.

The norm of a fused site returns a :class:`LazyNorm`.  The fused module takes the norm's input from it and does the norm itself;
any other reader gets the original norm's value, so a fusion is right also on paths that were never recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from te_convert.capture.tracer import is_recording


class Norm(Protocol):
    """What a lazy tensor asks of the norm module that made it."""

    def eager(self, x: Tensor) -> Tensor:
        """The original norm's own forward."""

    def borrowed(self) -> tuple[Tensor, ...]:
        """The parameters that it uses."""

    def output_dtype(self, x: Tensor) -> torch.dtype:
        """dtype of its output for an input like ``x`` in the current mode."""


class Mode(NamedTuple):
    """What decides how a torch call behaves: gradients, inference mode, autocast's dtype."""

    grad: bool
    inference: bool
    autocast: torch.dtype | None


def current_mode(device: str) -> Mode:
    """The mode of this thread for a device type."""
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return Mode(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)


@contextmanager
def _in_mode(mode: Mode, device: str) -> Iterator[None]:
    """Run as the norm would have run when it was called, whatever is switched on where its value is needed."""
    now = current_mode(device)
    with ExitStack() as stack:
        if now.inference != mode.inference:
            stack.enter_context(torch.inference_mode(mode.inference))
        stack.enter_context(torch.set_grad_enabled(mode.grad))
        if now.autocast != mode.autocast:
            enabled = mode.autocast is not None
            stack.enter_context(torch.autocast(device, enabled=enabled, dtype=mode.autocast))
        yield


_TOP_HOOKS: Callable[[bool], Any] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def saving() -> Any:
    """Who takes the tensors that are saved for backward here (a checkpoint, an offloader); None where torch cannot say."""
    return None if _TOP_HOOKS is None or torch.compiler.is_compiling() else _TOP_HOOKS(False)


def _any_inference(tensors: tuple[Tensor, ...]) -> bool:
    return any([tensor.is_inference() for tensor in tensors])  # noqa: C419  # runs at every norm call: a list is the fastest


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """How often each tensor was changed in place so far; -1 for tensors that do not count it."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class Pending:
    """What a lazy tensor stands for: a norm, its input, and what was computed from them so far.

    Attributes:
        stash: fused module's record → under which circumstances it ran, and the outputs that its readers have not taken yet.
    """

    __slots__ = ("_mode", "_parameters", "_saving", "_value", "_value_version", "_versions", "norm", "stash", "x")

    def __init__(self, norm: Norm, x: Tensor, parameters: tuple[Tensor, ...]) -> None:
        self.norm, self.x = norm, x
        self.stash: dict[int, tuple[Any, dict[int, Tensor]]] = {}
        self._value: Tensor | None = None
        self._value_version = 0
        self._mode, self._saving = current_mode(x.device.type), saving()
        self._parameters = parameters
        self._versions = None if x.is_inference() or _any_inference(parameters) else self._read_versions()

    def _read_versions(self) -> list[int]:
        return [self.x._version, *[parameter._version for parameter in self._parameters]]

    def _check_unchanged(self) -> None:
        if self._versions is not None and self._versions != self._read_versions():
            raise RuntimeError(
                "te_convert: the input or a weight of a fused norm was changed in place between the norm and its reader; "
                "convert with fuse=False, or exclude the norm"
            )

    def may_fuse(self) -> bool:
        """Whether a reader may take a fused module's output here; False when it has to take the norm's value."""
        if self._mode != current_mode(self.x.device.type):
            return False
        value = self._value  # when somebody holds it, they may have changed it in place
        return value is None or (self._versions is not None and value._version == self._value_version)

    def raw(self) -> Tensor | None:
        """The norm's input, when a fused module may use it here; None when it has to take the norm's value."""
        if not self.may_fuse():
            return None
        self._check_unchanged()
        return self.x

    def value(self) -> Tensor:
        """What the original norm returns for the input, in the mode in which the norm was called."""
        if self._value is None:
            self._check_unchanged()
            with torch._C.DisableTorchFunctionSubclass(), _in_mode(self._mode, self.x.device.type), self._as_at_the_norm():
                self._value = self.norm.eager(self.x)
            self._value_version = -1 if self._value.is_inference() else self._value._version
        return self._value

    def _as_at_the_norm(self) -> AbstractContextManager[Any]:
        """A checkpoint around the reader alone must not see the norm's tensors: its replay finds the value computed."""
        if _TOP_HOOKS is not None and saving() == self._saving:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(_itself, _itself)

    def expose(self) -> None:
        """From now on every reader takes the value: it may be changed where that is not counted, or its gradient is wanted."""
        self.value()
        self._value_version = -1

    def gradients(self, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the input and of the norm's parameters, for readers below ``__torch_function__``."""
        parameters = self._parameters
        with _in_mode(self._mode._replace(grad=True, inference=False), self.x.device.type):
            x = self.x.detach().requires_grad_(self.x.requires_grad)
            y = self.norm.eager(x)
            wanted = [tensor for tensor in (x, *parameters) if tensor.requires_grad]
            found = iter(torch.autograd.grad(y, wanted, upstream))
        return tuple(next(found) if tensor.requires_grad else None for tensor in (x, *parameters))


class _Defer(torch.autograd.Function):
    """Gives a lazy tensor a real ``grad_fn``: C++ code (reentrant checkpoint, custom Functions) does not ask it for its value."""

    @staticmethod
    def forward(ctx: Any, pending: Pending, dtype: torch.dtype, x: Tensor, *parameters: Tensor) -> Tensor:
        """Make the wrapper; the parameters are there so that autograd connects them."""
        ctx.pending = pending
        ctx.save_for_backward(x)
        return _wrapper(x, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        """Gradients of the norm by recomputation."""
        _ = ctx.saved_tensors  # raises when the input was changed in place
        return (None, None, *ctx.pending.gradients(upstream))


def _wrapper(x: Tensor, dtype: torch.dtype) -> Tensor:
    lazy: Tensor = torch.Tensor._make_wrapper_subclass(LazyNorm, x.shape, dtype=dtype, device=x.device)
    return lazy


_ATTRIBUTES = (
    "shape", "dtype", "device", "layout", "requires_grad", "ndim", "is_cuda", "is_sparse", "is_quantized", "is_meta", "is_nested",
    "is_mps", "is_xpu", "is_cpu", "itemsize", "grad_fn", "is_leaf",
)  # fmt: skip
_METHODS = (
    "size", "dim", "numel", "is_floating_point", "is_complex", "element_size", "get_device", "__len__", "ndimension", "nelement",
    "is_contiguous", "stride", "__hash__", "is_inference",
)  # fmt: skip
_METADATA = frozenset(
    {getattr(Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(Tensor, name)}
    | {getattr(Tensor, name) for name in _METHODS}
    | {torch.numel, torch.is_floating_point, torch.is_complex}
)
"""Questions that do not need the values."""

_EXPOSING = frozenset(
    {
        Tensor.data.__get__,  # type: ignore[attr-defined]  # torch's stub takes the property for a tensor
        Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.untyped_storage, Tensor.__dlpack__,
        Tensor.register_hook, Tensor.retain_grad, Tensor.register_post_accumulate_grad_hook, Tensor.requires_grad_,
    }
)  # fmt: skip
"""Ways to the value's memory past its version counter, and what is asked of its gradient."""

_CASTS = frozenset({"to", "type_as", "float", "bfloat16", "half"})
_FIXED_CASTS = {"float": torch.float32, "bfloat16": torch.bfloat16, "half": torch.float16}


class LazyNorm(Tensor):
    """The deferred output of a norm; behaves as the tensor that the norm would have returned."""

    @staticmethod
    def defer(norm: Norm, x: Tensor) -> Tensor:
        """A lazy tensor for ``norm(x)`` with the shape, dtype and device of the result."""
        parameters = norm.borrowed()
        dtype, pending = norm.output_dtype(x), Pending(norm, x, parameters)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *parameters)):
            lazy: Tensor = _Defer.apply(pending, dtype, x, *parameters)
        else:
            lazy = _wrapper(x, dtype)
        lazy.__dict__["pending"] = pending
        return lazy

    @property
    def pending(self) -> Pending:
        """What it stands for."""
        pending: Pending = self.__dict__["pending"]
        return pending

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer questions about shape and dtype, stay lazy through no-ops, and give anything else the value."""
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        same = _still_lazy(func, args, kwargs)
        if same is not None:
            return same
        if func in _EXPOSING:
            args[0].pending.expose()
        return func(*_values(args), **_values(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no cls
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Below autograd: the gradient goes through the lazy tensor's own ``grad_fn``."""
        return func(*_detached(args), **_detached(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Tensor:
        """A copy of the value, which is what a copy of the norm's output would be."""
        copied: Tensor = self.pending.value().__deepcopy__(memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the value."""
        return self.pending.value().__reduce_ex__(protocol)


def unwrap(value: Any) -> Any:
    """The value of a lazy tensor; anything else as it is."""
    if type(value) is not LazyNorm:
        return value
    plain = value.pending.value()
    if value.requires_grad and not plain.requires_grad:  # it left a reentrant checkpoint, which gave it a history
        with torch._C.DisableTorchFunctionSubclass():
            return value.clone()
    return plain


def _values(value: Any) -> Any:
    return _map(value, unwrap)


def _detached(value: Any) -> Any:
    return _map(value, lambda item: item.pending.value().detach() if type(item) is LazyNorm else item)


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply to everything in nested tuples, lists and dicts; named tuples stay such."""
    if isinstance(value, (list, tuple)):
        items = [_map(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    return change(value)


def _still_lazy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The result as a lazy tensor when the function changes nothing that a norm over the last dimension would notice."""
    lazy = args[0] if args else None
    if type(lazy) is not LazyNorm:
        return None
    name = getattr(func, "__name__", "")
    if (name == "contiguous" and not kwargs) or (name in _CASTS and _casts_nothing(name, lazy, args, kwargs)):
        return lazy
    if name == "dropout" and func is torch.nn.functional.dropout and _drops_nothing(args, kwargs):
        return lazy
    if name in ("view", "reshape") and not kwargs and isinstance(func, type(Tensor.view)):
        return _viewed(func, lazy, args[1:])
    return None


def _viewed(func: Any, lazy: LazyNorm, shape: tuple[Any, ...]) -> Tensor | None:
    """A view that keeps the last dimension commutes with the norm."""
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    pending = lazy.pending
    if not len(sizes) or not all(isinstance(size, int) for size in sizes) or sizes[-1] != pending.x.shape[-1]:
        return None
    x = pending.raw()
    if x is None:
        return None
    try:
        return LazyNorm.defer(pending.norm, func(x, *shape))
    except RuntimeError:  # the input has other strides than the norm's output would have
        return None


def _drops_nothing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    named = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    return named.get("training", True) is False or named.get("p", 0.5) == 0


def _casts_nothing(name: str, lazy: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a conversion returns its input unchanged, as torch would then do."""
    if name in _FIXED_CASTS:
        return len(args) == 1 and not kwargs and lazy.dtype is _FIXED_CASTS[name]
    if kwargs.get("copy") or kwargs.get("memory_format") is not None or len(args) > 3:
        return False
    targets = [*args[1:], *(value for key, value in kwargs.items() if key not in ("copy", "memory_format"))]
    return all(_is_already(lazy, target) for target in targets)


def _is_already(lazy: Tensor, target: Any) -> bool:
    if target is None or isinstance(target, bool):  # non_blocking, or an argument left out
        return target is not True or not lazy.is_cuda
    if isinstance(target, torch.dtype):
        return target is lazy.dtype
    if isinstance(target, Tensor):
        return target.dtype is lazy.dtype and target.device == lazy.device
    return isinstance(target, (str, torch.device)) and torch.device(target) == lazy.device


def can_defer(x: Any) -> bool:
    """Whether a norm's output may be deferred here: an ordinary tensor, and nobody is tracing, compiling or transforming."""
    return (
        (type(x) is Tensor or type(x) is torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and torch._C._functorch.peek_interpreter_stack() is None
        and not is_recording()
    )
