"""Every parameter and buffer of a model by name: what is stored, what is tied, what cannot be stored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from te_convert.errors import InputError


@dataclass(frozen=True)
class Slot:
    """One name of one tensor.

    Attributes:
        owner: the module that registered it.
        key: its name there.
        is_parameter: a Parameter, otherwise a buffer.
        persistent: part of ``state_dict()``.
    """

    owner: nn.Module
    key: str
    is_parameter: bool
    persistent: bool

    @property
    def tensor(self) -> torch.Tensor:
        """The Parameter or buffer object that the slot holds now."""
        held = (self.owner._parameters if self.is_parameter else self.owner._buffers)[self.key]
        if held is None:
            raise KeyError(self.key)
        return held

    def replace(self, tensor: torch.Tensor) -> None:
        """Put another object into the slot."""
        if self.is_parameter:
            self.owner._parameters[self.key] = tensor  # type: ignore[assignment]
        else:
            self.owner._buffers[self.key] = tensor


def find_slots(model: nn.Module) -> dict[str, Slot]:
    """Every parameter and buffer under each of its names; a tensor with two names has two slots."""
    slots: dict[str, Slot] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = prefix + "." if prefix else ""
        for key, parameter in module._parameters.items():
            if parameter is not None:
                slots[dot + key] = Slot(module, key, is_parameter=True, persistent=True)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                persistent = key not in module._non_persistent_buffers_set
                slots[dot + key] = Slot(module, key, is_parameter=False, persistent=persistent)
    return slots


def find_ties(slots: Mapping[str, Slot], public: Collection[str]) -> dict[str, str]:
    """For each further name of a tensor the name under which it is stored: its first one in ``public`` if there is one."""
    names: dict[int, list[str]] = {}
    for name, slot in slots.items():
        names.setdefault(id(slot.tensor), []).append(name)
    ties: dict[str, str] = {}
    for group in names.values():
        first = next((name for name in group if name in public), group[0])
        ties.update({name: first for name in group if name != first})
    return ties


def public_names(model: nn.Module, slots: Mapping[str, Slot]) -> set[str]:
    """Names of the slots that ``state_dict()`` has; refuses a model whose state is more than plain tensors with values.

    Raises:
        InputError: a tensor subclass, a tensor without values, an extra state with content, or state that is no tensor.
    """
    for name, slot in slots.items():
        _check_tensor(name, slot.tensor)
    public: set[str] = set()
    known = {(slot.tensor.data_ptr(), slot.tensor.shape) for slot in slots.values()}
    for name, value in model.state_dict().items():
        if name in slots:
            public.add(name)
            continue
        if _is_empty_extra_state(name, value):
            continue
        if name.endswith("_extra_state"):
            raise InputError(
                f"{name} holds state that is not a plain tensor (FP8 scaling factors or the like)",
                "convert before the model runs in FP8, or clear the extra state",
            )
        # A state-dict hook may rename a tensor; one that holds something else would be lost.
        if not isinstance(value, torch.Tensor) or (value.data_ptr(), value.shape) not in known:
            raise InputError(
                f"state_dict() holds {name}, which is no parameter or buffer of the model",
                "register it with register_buffer so that it can be stored",
            )
    return public


def _is_empty_extra_state(name: str, value: object) -> bool:
    if not name.endswith("_extra_state"):
        return False
    return value is None or (isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.numel() == 0)


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        raise InputError(f"{name} is a {type(tensor).__name__}, not a plain tensor", "convert before quantising or sharding")
    if tensor.is_meta:
        raise InputError(f"{name} has no values (it is on the meta device)", "load the weights before writing")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise InputError(f"{name} is a sparse or quantised tensor", "store it dense")
