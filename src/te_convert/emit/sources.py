"""Where a model comes from: a Python file, an importable module, or a Transformers directory."""

from __future__ import annotations

import re
from pathlib import Path

from torch import nn

from te_convert.emit.model_source import ModelSource, OpenedModel
from te_convert.emit.source_files import open_file, open_module, rebuild_file, rebuild_module
from te_convert.emit.transformers_dir import open_transformers, rebuild_transformers, source_of_transformers
from te_convert.errors import InputError, LoadError

__all__ = ["ModelSource", "OpenedModel", "open_source", "rebuild", "source_of"]

WEIGHT_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors", ".ckpt", ".gguf")
_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_][\w.]*)", re.DOTALL)
_MODULE = re.compile(r"(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)(:(?P<name>[A-Za-z_][\w.]*))?")
_FORMS = "give file.py, file.py:name, package.module:name or a Transformers directory"


def open_source(spec: str) -> OpenedModel:
    """Open ``file.py``, ``file.py:name``, ``pkg.mod``, ``pkg.mod:name`` or a Transformers directory.

    Prints of the model's source go to stderr.

    Raises:
        InputError: there is no such thing, it fails, or it offers no model or several.
        EnvironmentLacksError: a Transformers directory, and Transformers is not installed.
    """
    if not spec.strip():
        raise InputError("MODEL is empty", _FORMS)
    path = Path(spec)
    if path.is_dir():
        return _open_directory(path)
    if path.suffix.lower() in WEIGHT_SUFFIXES:
        raise InputError(f"{spec} holds weights, not a model", f"give the model's source, and --weights {spec}")
    named = None if path.is_file() else _FILE.fullmatch(spec)
    file = Path(named["file"]) if named else path
    if file.suffix == ".py":
        if not file.is_file():
            raise InputError(f"{file} does not exist" if not file.exists() else f"{file} is not a file", _FORMS)
        return open_file(file, named["name"] if named else None)
    if path.exists():
        raise InputError(f"{spec} is not a .py file", _FORMS)
    module = _MODULE.fullmatch(spec)
    if module is None:
        raise InputError(f"{spec!r} does not exist", _FORMS)
    return open_module(module["module"], module["name"])


def _open_directory(path: Path) -> OpenedModel:
    if (path / "config.json").is_file():
        return open_transformers(path)
    if (path / "manifest.json").is_file():
        raise InputError(f"{path} is a converted directory already", f"load it with te_convert.load({str(path)!r})")
    files = sorted(file.name for file in path.glob("*.py"))
    hint = f"name the file, for instance {path / files[0]}" if files else _FORMS
    raise InputError(f"{path} is a directory without config.json", hint)


def source_of(model: nn.Module) -> ModelSource | None:
    """The source of a live Transformers model, from its config; None for any other model."""
    return source_of_transformers(model)


def rebuild(source: ModelSource, directory: Path) -> nn.Module:
    """Build the model again, with arbitrary weights, from the files in ``directory/source/``.

    Raises:
        LoadError: the source fails, changed, or no longer offers the model.
        EnvironmentLacksError: it needs Transformers, which is not installed.
    """
    try:
        if source.kind == "file":
            return rebuild_file(source, directory / "source")
        if source.kind == "module":
            return rebuild_module(source)
        return rebuild_transformers(source, directory / "source")
    except InputError as error:
        raise LoadError(f"the model cannot be built again: {error}", error.hint) from error
