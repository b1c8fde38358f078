"""What is in force around a call of the public functions and must not decide what they find."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from te_convert.errors import InputError

_DEVICE_TYPES = ("cpu", "cuda")


@contextmanager
def plain_modes() -> Iterator[None]:
    """Run outside the caller's inference mode, ``no_grad``, autocast and meta default device; all of them come back afterwards.

    A model copied in inference mode could not be trained, and autocast would be taken for a part of the model.  Another default
    device stays, since a forward may rely on it; so does the default dtype, see :func:`float32_by_default`.

    Raises:
        InputError: inside ``torch.jit.trace`` or a transform of ``torch.func``, where no value can be looked at.
    """
    around = _transform()
    if around:
        raise InputError(
            f"a model cannot be converted or compared inside {around}", "convert it outside, and call the result there"
        )
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device_type in _DEVICE_TYPES:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        if torch.get_default_device().type == "meta":
            stack.enter_context(torch.device("cpu"))
        yield


@contextmanager
def float32_by_default() -> Iterator[None]:
    """Run with float32 as the default dtype, as probes do whose numbers it would change; the caller's comes back afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _transform() -> str:
    """What traces or transforms the running code, or ""."""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    return "a transform of torch.func" if torch._C._functorch.peek_interpreter_stack() is not None else ""
