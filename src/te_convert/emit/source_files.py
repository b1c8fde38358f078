"""Models from a Python file or from an importable module."""

from __future__ import annotations

import copy
import hashlib
import importlib
import importlib.util
import itertools
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from te_convert.emit.find_model import Found, find_model
from te_convert.emit.model_source import ModelSource, OpenedModel
from te_convert.emit.user_code import SourceOnlyLoader, describe_failure, is_installed, one_line, user_code
from te_convert.errors import InputError

_counter = itertools.count(1)


def open_file(path: Path, name: str | None) -> OpenedModel:
    """The model that a Python file offers, with its ``example_inputs()``.

    Raises:
        InputError: the file fails, or offers no model or several.
    """
    directory, before = path.resolve().parent, set(sys.modules.items())
    with user_code(directory, str(path)):
        module = execute_file(path)
        found = find_model(module, name, str(path))
        model = build_found(found, str(path), directory)
        inputs = _example_inputs(module, str(path), directory)
        files = {path.name: path.read_bytes(), **_siblings(directory, before)}
    source = ModelSource(
        kind="file",
        entry=found.entry,
        main=path.name,
        files=tuple(files),
        content=files,
        origins=tuple(directory / file for file in files),
    )
    return OpenedModel(model, inputs, source)


def rebuild_file(source: ModelSource, directory: Path) -> nn.Module:
    """Build the model again from the copied files.

    Raises:
        InputError: the source fails.
    """
    root = directory.resolve()
    with user_code(root, source.main):
        module = execute_file(root / source.main)
        return build_found(find_model(module, source.entry, source.main), source.main, root)


def execute_file(path: Path) -> ModuleType:
    """Execute a file as a new module; inside :func:`user_code`.

    The module stays in ``sys.modules`` under a name of its own, so that dataclasses and pickling work inside it.

    Raises:
        InputError: the file cannot be read or fails.
    """
    absolute = path.resolve()
    unique = f"te_convert_source_{re.sub(r'[^0-9a-zA-Z_]', '_', path.stem)}_{next(_counter)}"
    loader = SourceOnlyLoader(unique, str(absolute))
    spec = importlib.util.spec_from_file_location(unique, absolute, loader=loader)
    if spec is None:
        raise InputError(f"{path} cannot be imported", "give a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[unique]
        raise InputError(*describe_failure(error, str(path), absolute.parent)) from error
    return module


def open_module(name: str, entry: str | None) -> OpenedModel:
    """The model that an importable module offers; a module-level instance is copied, so that it stays as it is.

    Raises:
        InputError: there is no such module, it fails, or it offers no model or several.
    """
    with user_code(Path.cwd(), isolate=False):
        file = _module_file(name)
        module = _import(name)
        found = find_model(module, entry, name)
        model = _own(build_found(found, name, None), found, name)
        inputs = _example_inputs(module, name, None)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return OpenedModel(model, inputs, ModelSource("module", found.entry, name, sha256=digest, origins=(file,)))


def rebuild_module(source: ModelSource) -> nn.Module:
    """Build the model again from an importable module, whose file has to be the one that was converted.

    Raises:
        InputError: the module is missing, changed or fails.
    """
    with user_code(Path.cwd(), isolate=False):
        file = _module_file(source.main)
        if hashlib.sha256(file.read_bytes()).hexdigest() != source.sha256:
            raise InputError(f"the source changed since conversion: module {source.main}", "convert the model again")
        found = find_model(_import(source.main), source.entry, source.main)
        return _own(build_found(found, source.main, None), found, source.main)


def stored_inputs(source: ModelSource, directory: Path) -> Any | None:
    """The ``example_inputs`` of a copied file or an importable module; None when it offers none, or for another kind of source.

    Raises:
        InputError: the source fails.
    """
    if source.kind == "file":
        root = directory.resolve()
        with user_code(root, source.main):
            return _example_inputs(execute_file(root / source.main), source.main, root)
    if source.kind == "module":
        with user_code(Path.cwd(), isolate=False):
            return _example_inputs(_import(source.main), source.main, None)
    return None


def build_found(found: Found, where: str, directory: Path | None) -> nn.Module:
    """Build a found model; the source's exceptions become one line.

    Raises:
        InputError: it failed, or returned something else than a module.
    """
    try:
        return found.build()
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(*describe_failure(error, f"{found.label} of {where}", directory)) from error


def _example_inputs(module: ModuleType, where: str, directory: Path | None) -> Any | None:
    offered = getattr(module, "example_inputs", None)
    if not callable(offered):
        return offered
    try:
        return offered()
    except (Exception, SystemExit) as error:
        raise InputError(*describe_failure(error, f"example_inputs() of {where}", directory)) from error


def _siblings(directory: Path, before: set[tuple[str, ModuleType]]) -> dict[str, bytes]:
    """Python files below the directory that were imported since ``before``, by relative POSIX name."""
    found: dict[str, bytes] = {}
    for name, module in sorted(sys.modules.items(), key=lambda item: item[0]):
        file = getattr(module, "__file__", None)
        if (name, module) in before or not isinstance(file, str) or not file.endswith(".py"):
            continue
        path = Path(file)
        if path.is_relative_to(directory) and not is_installed(path.relative_to(directory)) and path.is_file():
            found[path.relative_to(directory).as_posix()] = path.read_bytes()
    return found


def _module_file(name: str) -> Path:
    try:
        spec = importlib.util.find_spec(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name is not None and name.startswith(error.name):
            spec = None
        else:
            raise InputError(*describe_failure(error, name, None)) from error
    if spec is None:
        raise InputError(
            f"no file, directory or importable module is called {name!r}", "give file.py, package.module:name or a directory"
        )
    if spec.origin is None or not Path(spec.origin).is_file():
        raise InputError(f"module {name} has no source file", "name a module that is a Python file")
    return Path(spec.origin)


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise InputError(*describe_failure(error, name, None)) from error


def _own(model: nn.Module, found: Found, where: str) -> nn.Module:
    if model is not found.value:
        return model
    try:
        own: nn.Module = copy.deepcopy(model)
    except Exception as error:
        message = f"{found.entry} in {where} cannot be copied: {type(error).__name__}: {one_line(error)}"
        raise InputError(message, "name a function that returns a new model") from error
    return own
