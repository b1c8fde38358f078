"""Loading the user's weights into the user's model: safetensors, a sharded index, or a pickle that holds tensors only."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from te_convert.emit.model_source import is_safe_name
from te_convert.emit.slots import find_slots
from te_convert.emit.user_code import one_line
from te_convert.errors import InputError

_PICKLES = (".pt", ".pth", ".bin", ".ckpt")
_WRAPPERS = ("state_dict", "model", "model_state_dict")
_PREFIXES = ("module.", "_orig_mod.")
_SAVE = "save a state_dict: torch.save(model.state_dict(), path), or safetensors"
_GLOBAL = re.compile(r"GLOBAL\s+(\S+)")


def load_weights(model: nn.Module, path: Path | str) -> None:
    """Load a checkpoint into the model; every tensor of either side has to fit.

    ``{"state_dict": …}`` and ``{"model": …}`` are unwrapped; ``module.`` and ``_orig_mod.`` are dropped when every key has
    them.  A key that is missing although the tensor is tied to one that is there is fine.

    Raises:
        InputError: the file cannot be read or needs code to be read, or keys or shapes do not fit.  Wrong shapes and tied
            tensors with different values are found before the model is touched; missing and unexpected keys afterwards, because
            modules may rename keys as they load.
    """
    file = Path(path)
    if not file.exists():
        raise InputError(f"{path} does not exist", "give a .safetensors, .safetensors.index.json, .pt, .pth or .bin file")
    if file.is_dir():
        raise InputError(f"{path} is a directory", "give model.safetensors or model.safetensors.index.json in it")
    tensors = _strip_prefixes(_read(file), model)
    ties = _tie_groups(model)
    _check_ties(tensors, ties, file)
    wrong = _wrong_shapes(model, tensors)
    fitting = tensors
    if wrong:
        fitting = OrderedDict((key, value) for key, value in tensors.items() if key not in wrong)
    missing, unexpected = _load(model, fitting, file)
    present = {name for key in tensors for name in ties.get(key, {key})}
    absent = [key for key in missing if key not in present and not key.endswith("_extra_state")]
    problems = {"missing": absent, "unexpected": unexpected, "wrongly shaped": list(wrong.values())}
    if any(problems.values()):
        found = "; ".join(_some(title, keys) for title, keys in problems.items() if keys)
        raise InputError(f"{path} does not fit the model: {found}", _mismatch_hint(model, tensors))


def _read(file: Path) -> OrderedDict[str, torch.Tensor]:
    if file.name.endswith(".index.json"):
        return _read_index(file)
    if file.suffix == ".safetensors":
        try:
            return OrderedDict(load_file(file))
        except (SafetensorError, OSError, ValueError) as error:
            raise InputError(
                f"{file} is not a readable safetensors file: {one_line(error)}", "download or save it again"
            ) from error
    if file.suffix in _PICKLES:
        return read_pickle(file)
    raise InputError(f"{file} is not a weights file that is known", "give .safetensors, .safetensors.index.json, .pt, .pth or .bin")


def _read_index(file: Path) -> OrderedDict[str, torch.Tensor]:
    try:
        names = sorted(set(json.loads(file.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is not an index of shards: {one_line(error)}", 'it needs {"weight_map": {key: file}}') from error
    tensors: OrderedDict[str, torch.Tensor] = OrderedDict()
    for name in names:
        if not is_safe_name(name):
            raise InputError(f"{file} names {name!r}, which is not a file beside it", "correct the index")
        if not (file.parent / name).is_file():
            raise InputError(f"{file} names {name}, which does not exist", "download every shard")
        tensors.update(_read(file.parent / name))
    return tensors


def read_pickle(file: Path, mmap: bool = False) -> OrderedDict[str, torch.Tensor]:
    """The tensors of a file that torch.save wrote, read with ``weights_only``; with ``mmap`` their memory is the file's.

    Raises:
        InputError: it cannot be read, or holds or needs more than tensors.
    """
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap and zipfile.is_zipfile(file))
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError) as error:
        raise _pickle_error(file, error) from error
    return _tensors(_unwrap(loaded, file), file)


def _pickle_error(file: Path, error: Exception) -> InputError:
    refused = _GLOBAL.search(str(error))
    if refused is not None:
        return InputError(f"{file} is a pickle that runs code to load: it needs {refused[1]}, which is refused", _SAVE)
    if "TorchScript" in str(error):
        return InputError(f"{file} is a TorchScript archive, not weights", _SAVE)
    if isinstance(error, pickle.UnpicklingError) and "Weights only load failed" in str(error):
        return InputError(f"{file} is a pickle that holds more than tensors, which is refused", _SAVE)
    return InputError(f"{file} cannot be read: {type(error).__name__}: {one_line(error, 160)}", "save or download it again")


def _unwrap(loaded: Any, file: Path) -> Mapping[Any, Any]:
    if isinstance(loaded, Mapping) and not any(isinstance(value, torch.Tensor) for value in loaded.values()):
        for wrapper in _WRAPPERS:
            if isinstance(loaded.get(wrapper), Mapping):
                return loaded[wrapper]  # type: ignore[no-any-return]
    if not isinstance(loaded, Mapping):
        raise InputError(f"{file} holds a {type(loaded).__name__}, not a state_dict", _SAVE)
    return loaded


def _tensors(state: Mapping[Any, Any], file: Path) -> OrderedDict[str, torch.Tensor]:
    others = [str(key) for key, value in state.items() if not isinstance(value, torch.Tensor) and not _is_extra(key, value)]
    if others or not state:
        held = ", ".join(others[:8]) or "nothing"
        raise InputError(f"{file} holds more or other things than tensors: {held}", _SAVE)
    tensors = OrderedDict((str(key), value) for key, value in state.items() if isinstance(value, torch.Tensor))
    if hasattr(state, "_metadata"):  # versions of the modules' layouts, by which old checkpoints are upgraded
        tensors._metadata = state._metadata  # type: ignore[attr-defined]
    return tensors


def _is_extra(key: Any, value: Any) -> bool:
    return value is None and str(key).endswith("_extra_state")


def _strip_prefixes(tensors: OrderedDict[str, torch.Tensor], model: nn.Module) -> OrderedDict[str, torch.Tensor]:
    own = list(model.state_dict())
    while True:
        prefix = next((p for p in _PREFIXES if tensors and all(key.startswith(p) for key in tensors)), None)
        if prefix is None or all(key.startswith(prefix) for key in own):
            return tensors
        tensors = OrderedDict((key.removeprefix(prefix), value) for key, value in tensors.items())


def _tie_groups(model: nn.Module) -> dict[str, set[str]]:
    """All names of the tensor that a name stands for."""
    groups: dict[int, set[str]] = {}
    slots = find_slots(model)
    for name, slot in slots.items():
        groups.setdefault(id(slot.tensor), set()).add(name)
    return {name: groups[id(slot.tensor)] for name, slot in slots.items()}


def _check_ties(tensors: Mapping[str, torch.Tensor], ties: Mapping[str, set[str]], file: Path) -> None:
    for name, tensor in tensors.items():
        for other in ties.get(name, ()):
            if name < other and other in tensors and not torch.equal(tensor, tensors[other]):
                raise InputError(
                    f"{file} has different values for {name} and {other}, which the model ties together",
                    "untie them in the model, or save the weights of a tied one",
                )


def _wrong_shapes(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    wrong: dict[str, str] = {}
    for name, slot in find_slots(model).items():
        given = tensors.get(name)
        if given is None or nn.parameter.is_lazy(slot.tensor) or given.shape == slot.tensor.shape:
            continue
        wrong[name] = f"{name} {list(given.shape)} in the file, {list(slot.tensor.shape)} in the model"
    return wrong


def _load(model: nn.Module, tensors: OrderedDict[str, torch.Tensor], file: Path) -> tuple[list[str], list[str]]:
    try:
        result = model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise InputError(f"{file} does not fit the model: {one_line(error)}", "give the weights of this model") from error
    return list(result.missing_keys), [key for key in result.unexpected_keys if not key.endswith("_extra_state")]


def _mismatch_hint(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> str:
    first = {key.partition(".")[0] + "." for key in tensors}
    prefix = first.pop() if len(first) == 1 else ""
    if prefix and not any(key.startswith(prefix) for key in model.state_dict()):
        return f"every key of the file starts with {prefix!r}: save the state_dict of that part alone"
    return "give the weights of this model, or the source of the model that has these weights"


def _some(title: str, keys: list[str], most: int = 8) -> str:
    return f"{len(keys)} {title} ({', '.join(keys[:most])}{', …' if len(keys) > most else ''})"
