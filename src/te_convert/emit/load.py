"""Loading a converted directory: everything is checked first, and no pickle is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from te_convert.emit.manifest import Manifest, read_manifest
from te_convert.emit.slots import Slot, find_slots
from te_convert.emit.sources import rebuild
from te_convert.emit.tensors_file import BUFFERS, INDEX, file_record, read_tensors
from te_convert.emit.user_code import one_line
from te_convert.errors import EnvironmentLacksError, InputError, LoadError, TeConvertError
from te_convert.plan.model import PLAN_ATTRIBUTE, Plan
from te_convert.rewrite.apply import apply_plan
from te_convert.rewrite.materialize import allow_fallback
from te_convert.runtime.backend import Backend, choose_backend

_AGAIN = "convert the model again, or restore the file"
_CHANGED = "the source or its packages changed; convert the model again"


def load_directory(path: Path | str, device: torch.device | str | None = None, backend: str = "auto") -> nn.Module:
    """Load a directory that :func:`te_convert.emit.write.write_directory` wrote.

    Digests are compared before anything is executed; what is executed then is the model's own source and nothing else.

    Args:
        path: the directory.
        device: where the model goes; None leaves it on the CPU.
        backend: "auto", "te" or "reference".  With "auto" a site whose TE module does not work on this machine goes on as its twin,
            with a warning.

    Returns:
        The model with its tensors, ties, ``requires_grad`` and training flags.

    Raises:
        LoadError: a missing, changed or truncated file, an unknown schema, a source that changed, or tensors that do not fit.
        InputError: a device that PyTorch does not know.
        EnvironmentLacksError: ``backend="te"`` and Transformer Engine is not usable here, or no GPU for ``device="cuda"``.
    """
    directory = Path(path)
    place = _parse_device(device)
    if place is not None and place.type == "cuda" and not torch.cuda.is_available():
        raise EnvironmentLacksError("no CUDA device is available", "load the model without device=, it then stays on the CPU")
    manifest = read_manifest(directory)
    check_files(directory, manifest)
    plan = read_plan(directory)
    chosen = choose_backend(backend, place.type if place is not None else "cpu")
    with torch.random.fork_rng(devices=[]):
        built = rebuild(manifest.source, directory)
        model, chosen = _apply_or_fall_back(built, plan, chosen, demanded=backend != "auto")
    slots = find_slots(model)
    restore_ties(slots, manifest.ties)
    _assign(model, slots, directory, manifest)
    _restore_flags(model, slots, manifest)
    if plan.converting:
        model.__dict__[PLAN_ATTRIBUTE] = plan
    if backend == "auto":
        allow_fallback(model, chosen)
    return model if place is None else model.to(place)


def check_files(directory: Path, manifest: Manifest) -> None:
    """Every listed file is there as it was written, and ``source/`` holds nothing else that Python would import.

    Raises:
        LoadError: naming the file.
    """
    for name, record in manifest.files.items():
        path = directory / name
        if any(part.is_symlink() for part in (path, *path.parents[: name.count("/")])):
            raise LoadError(f"{name} is a symbolic link", "do not load it, or convert the model again")
        if not path.is_file():
            raise LoadError(f"{name} is missing", _AGAIN)
        try:
            same = path.stat().st_size == record.size and file_record(path) == record
        except OSError as error:
            raise LoadError(f"{name} cannot be read: {one_line(error.strerror or error)}", "check its permissions") from error
        if not same:
            raise LoadError(f"{name} was changed or truncated", _AGAIN)
    for name in ("plan.json", BUFFERS, *(f"source/{file}" for file in manifest.source.files)):
        if name not in manifest.files:
            raise LoadError(f"manifest.json does not list {name}", "convert the model again")
    _check_source_folder(directory, manifest)


def _check_source_folder(directory: Path, manifest: Manifest) -> None:
    folder = directory / "source"
    if folder.is_symlink():
        raise LoadError("source is a symbolic link", "do not load it, or convert the model again")
    suffixes = tuple(all_suffixes())
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink():
            raise LoadError(f"{name} is a symbolic link", "do not load it, or convert the model again")
        # Bytecode in __pycache__ is never read, so one that another program left there does no harm.
        if path.name.endswith(suffixes) and name not in manifest.files and "__pycache__" not in path.parts:
            raise LoadError(f"{name} was added after the conversion", "remove it, or convert the model again")


def _parse_device(device: torch.device | str | None) -> torch.device | None:
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"unknown device {device!r}: {one_line(error)}", "use for instance cpu or cuda") from None


def read_plan(directory: Path) -> Plan:
    """The plan of a converted directory.

    Raises:
        LoadError: it is not readable, or of an unknown schema.
    """
    try:
        data = json.loads((directory / "plan.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise LoadError(f"plan.json is not readable JSON: {error}", "convert the model again") from None
    if not isinstance(data, dict):
        raise LoadError("plan.json is not readable JSON: no object", "convert the model again")
    return Plan.from_dict(data)


def _apply_or_fall_back(model: nn.Module, plan: Plan, chosen: Backend, demanded: bool) -> tuple[nn.Module, Backend]:
    """On twins where TE imports and does not build the modules, unless TE was demanded; the backend says why.

    Raises:
        EnvironmentLacksError: ``demanded``, and TE's constructors fail for a plan that fits the model.
    """
    try:
        return _apply(model, plan, chosen.name), chosen
    except TeConvertError as error:
        if chosen.name != "te" or (demanded and isinstance(error, EnvironmentLacksError)):
            raise
        root = _apply(model, plan, "reference")  # a plan that does not fit the model fails here as well
        why = str(error.__cause__ or error)
        if demanded:
            raise EnvironmentLacksError(f"Transformer Engine does not build the modules: {why}", "run te-convert doctor") from error
        return root, Backend("reference", why, missed=why)


def _apply(model: nn.Module, plan: Plan, backend: str) -> nn.Module:
    try:
        root: nn.Module = apply_plan(model, plan, backend).model
    except TeConvertError:
        raise
    except Exception as error:
        message = f"the plan does not fit the model: {type(error).__name__}: {one_line(error)}"
        raise LoadError(message, _CHANGED) from error
    return root


def restore_ties(slots: dict[str, Slot], ties: dict[str, str]) -> None:
    """Names that shared a tensor share it again; names that did not get tensors of their own."""
    seen: dict[int, str] = {}
    for name, slot in slots.items():
        if name in ties:
            continue
        other = seen.setdefault(id(slot.tensor), name)
        if other == name:
            continue
        if slots[other] == slot:
            raise LoadError(f"{name} and {other} are one module in the rebuilt model, but not in the converted one", _CHANGED)
        fresh = slot.tensor.detach().clone()
        slot.replace(nn.Parameter(fresh, slot.tensor.requires_grad) if slot.is_parameter else fresh)
    for name, stored in ties.items():
        if name not in slots or stored not in slots:
            raise LoadError(f"the rebuilt model has no {name if name not in slots else stored}", _CHANGED)
        if slots[name].tensor is not slots[stored].tensor:
            slots[name].replace(slots[stored].tensor)


def _assign(model: nn.Module, slots: dict[str, Slot], directory: Path, manifest: Manifest) -> None:
    """Give every slot its stored tensor."""
    wanted = {name for name, slot in slots.items() if slot.persistent and name not in manifest.ties}
    unexpected: list[str] = []
    for file in (*_weight_files(directory, manifest), BUFFERS):
        for name, tensor in _stored(directory, file):
            if name in slots and name not in manifest.ties:
                set_value(name, slots[name], tensor)
                wanted.discard(name)
            elif file == BUFFERS and name not in slots:
                _register(model, name, tensor)
            else:
                unexpected.append(name)
    if wanted or unexpected:
        parts = [_some(sorted(names), title) for names, title in ((wanted, "missing"), (unexpected, "unexpected")) if names]
        raise LoadError(f"the stored tensors do not fit the rebuilt model: {'; '.join(parts)}", _CHANGED)


def _weight_files(directory: Path, manifest: Manifest) -> list[str]:
    if "model.safetensors" in manifest.files:
        return ["model.safetensors"]
    if INDEX not in manifest.files:
        raise LoadError("manifest.json lists no weights", "convert the model again")
    try:
        files = set(json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{INDEX} is damaged: {type(error).__name__}: {error}", "convert the model again") from None
    for name in files:
        if name not in manifest.files:
            raise LoadError(f"{INDEX} names {name!r}, which manifest.json does not list", "convert the model again")
    return sorted(files)


def _stored(directory: Path, file: str) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        yield from read_tensors(directory / file)
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{file} cannot be read: {one_line(error)}", _AGAIN) from error


def set_value(name: str, slot: Slot, value: torch.Tensor) -> None:
    """Put values and dtype of the file into the tensor object that the slot holds, so that other references see them."""
    held = slot.tensor
    if slot.is_parameter and held.shape != value.shape:
        raise LoadError(f"{name} is {list(value.shape)} in the file and {list(held.shape)} in the rebuilt model", _CHANGED)
    with torch.no_grad():
        if held.shape == value.shape and held.dtype == value.dtype and not _overlaps(held):
            held.copy_(value)
        else:
            held.data = value.to(held.device)


def _overlaps(tensor: torch.Tensor) -> bool:
    """True when elements share memory, as in an expanded tensor."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _register(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """A non-persistent buffer that the model made while it ran, and that its constructor does not make."""
    owner, _, key = name.rpartition(".")
    try:
        module: Any = model.get_submodule(owner)
        module.register_buffer(key, value, persistent=False)
    except (AttributeError, KeyError) as error:
        raise LoadError(f"the rebuilt model has no place for the buffer {name}: {one_line(error)}", _CHANGED) from None


def _restore_flags(model: nn.Module, slots: dict[str, Slot], manifest: Manifest) -> None:
    frozen = set(manifest.frozen)
    for name, slot in slots.items():
        if slot.is_parameter and name not in manifest.ties:
            slot.tensor.requires_grad_(name not in frozen)
    exceptions = set(manifest.training_exceptions)
    for name, module in model.named_modules():
        module.training = manifest.training != (name in exceptions)


def _some(names: list[str], title: str) -> str:
    return f"{len(names)} {title} ({', '.join(names[:8])}{', …' if len(names) > 8 else ''})"
