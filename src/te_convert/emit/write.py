"""Writing a converted model as a directory: all of it or nothing, and never a pickle."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from te_convert.emit.manifest import MANIFEST, FileRecord, Manifest, installed_versions
from te_convert.emit.model_source import ModelSource
from te_convert.emit.skeleton import check_skeleton
from te_convert.emit.slots import Slot, find_slots, find_ties, public_names
from te_convert.emit.tensors_file import BUFFERS, INDEX, WEIGHTS, name_shards, plan_shards, tensor_bytes, write_bytes, write_tensors
from te_convert.emit.user_code import one_line
from te_convert.errors import InputError
from te_convert.plan.model import Plan

SHARD_BYTES = 5_000_000_000
_ELSEWHERE = "choose another --out"

_INIT = '''"""A model converted by te_convert; report.md says what was converted and what was verified."""

from pathlib import Path

import te_convert


def load_model(device=None, backend="auto"):
    """Load the model: ``backend`` is "auto", "te" (Transformer Engine) or "reference" (pure PyTorch)."""
    return te_convert.load(Path(__file__).parent, device=device, backend=backend)
'''


class _Figures(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


class ReportLike(Protocol):
    """What is read of a report."""

    @property
    def converted(self) -> bool:
        """Whether a site was converted."""

    @property
    def recipe(self) -> str | None:
        """The recipe asked for."""

    @property
    def backend(self) -> str:
        """The backend of verification."""

    @property
    def parity(self) -> _Figures:
        """The verdict of verification."""

    def to_json(self) -> str:
        """The report as JSON."""

    def to_markdown(self) -> str:
        """The report as Markdown."""

    def to_html(self) -> str:
        """The report as HTML."""


def write_directory(
    model: nn.Module,
    plan: Plan,
    report: ReportLike,
    source: ModelSource | None,
    out: Path | str,
    *,
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a directory from which :func:`te_convert.emit.load.load_directory` makes the model again.

    Everything is written to a hidden sibling, flushed to the disk and renamed; after any exception ``out`` is as it was.

    Args:
        model: the converted model (or the unchanged one, with a plan that converts nothing).
        plan: what was converted.
        report: the report to write beside it.
        source: where the model came from.
        out: the directory to write; missing parents are made.
        force: replace an existing directory.
        shard_bytes: weights above this size are split over several files.

    Returns:
        ``out`` as a path.

    Raises:
        InputError: ``out`` exists, holds the model's source or cannot be written; the model cannot be built again from its
            source, or has state that is no plain tensor.
    """
    if source is None:
        raise InputError("there is no source from which the model could be built again", "open it from a file or module")
    target = Path(out).absolute()
    check_out(out, force, source)
    temporary = target.with_name(f".{target.name}.tmp-{secrets.token_hex(4)}")
    parents = [parent for parent in target.parents if not parent.exists()]
    try:
        temporary.mkdir(parents=True)
        _write_all(temporary, model, plan, report, source, shard_bytes)
        rename_into_place(temporary, target, force)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in parents:
            with suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError):
            raise InputError(f"{out} cannot be written: {one_line(error.strerror or error)}", _ELSEWHERE) from error
        raise
    return Path(out)


def _write_all(directory: Path, model: nn.Module, plan: Plan, report: ReportLike, source: ModelSource, shard_bytes: int) -> None:
    """Write every file into a new directory, the manifest last, and flush it."""
    slots = find_slots(model)
    public = public_names(model, slots)
    ties = find_ties(slots, public)
    own = {name: slot.tensor for name, slot in slots.items() if name not in ties}
    files = write_texts(directory, plan, report, source)
    check_skeleton(model, plan, source, directory)
    files |= _write_weights(directory, {name: own[name] for name in own if name in public}, shard_bytes)
    files[BUFFERS] = write_tensors(directory / BUFFERS, {name: own[name] for name in own if name not in public})
    write_manifest(directory, model, report, source, slots, ties, files)


def check_out(out: Path | str, force: bool = False, source: ModelSource | None = None) -> None:
    """Whether a directory can be written there; asked before the work as well as when it is done.

    Raises:
        InputError: ``out`` exists and ``force`` is not given, is no directory that may be replaced, holds the model's source or
            the working directory, or its parent cannot be written.
    """
    target = Path(out).absolute()
    real = target.resolve()
    origins = source.origins if source is not None else ()
    # A file of Hugging Face's cache is a link to one in another folder.
    if any(place.is_relative_to(real) for origin in origins for place in (origin, origin.resolve())):
        raise InputError(f"{out} holds the model's source, which would be overwritten", _ELSEWHERE)
    if target.is_symlink():
        raise InputError(f"{out} is a symbolic link", "name the directory itself")
    if not target.exists():
        _check_parent(target, shown=str(out))
        return
    if not target.is_dir():
        raise InputError(f"{out} exists and is not a directory", _ELSEWHERE)
    if not force:
        raise InputError(f"{out} exists", "use --force to replace it")
    if any(place.is_relative_to(real) for place in (Path.cwd(), Path.home().resolve())):
        raise InputError(f"{out} holds the working or the home directory; it is not replaced", _ELSEWHERE)
    _check_parent(target, shown=str(out))


def _check_parent(target: Path, shown: str) -> None:
    parent = next(folder for folder in target.parents if folder.exists())
    if not parent.is_dir():
        raise InputError(f"{shown} cannot be written: {parent} is not a directory", _ELSEWHERE)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"{shown} cannot be written: no permission in {parent}", _ELSEWHERE)


def write_texts(directory: Path, plan: Plan, report: ReportLike, source: ModelSource) -> dict[str, FileRecord]:
    """Write the plan, the report, ``__init__.py`` and the source; their digests."""
    texts = {
        "__init__.py": _INIT,
        "plan.json": plan.to_json(),
        "report.json": report.to_json(),
        "report.md": report.to_markdown(),
        "report.html": report.to_html(),
    }
    files = {name: write_bytes(directory / name, text.encode()) for name, text in texts.items()}
    for name in source.files:
        if name not in source.content:
            raise InputError(f"the contents of the source file {name} are not known", "open the source again")
        path = directory / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        files[f"source/{name}"] = write_bytes(path, source.content[name])
    return files


def _write_weights(directory: Path, tensors: Mapping[str, torch.Tensor], shard_bytes: int) -> dict[str, FileRecord]:
    shards = plan_shards({name: tensor_bytes(tensor) for name, tensor in tensors.items()}, shard_bytes)
    if len(shards) == 1:
        return {WEIGHTS: write_tensors(directory / WEIGHTS, tensors)}
    files: dict[str, FileRecord] = {}
    weight_map: dict[str, str] = {}
    for file, names in name_shards(shards):
        files[file] = write_tensors(directory / file, {name: tensors[name] for name in names})
        weight_map.update(dict.fromkeys(names, file))
    total = sum(tensor_bytes(tensor) for tensor in tensors.values())
    files[INDEX] = write_bytes(directory / INDEX, index_json(weight_map, total).encode())
    return files


def index_json(weight_map: Mapping[str, str], total_size: int) -> str:
    """The index of a sharded checkpoint, in the form that Transformers uses."""
    return json.dumps({"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}, indent=1)


def write_manifest(
    directory: Path,
    model: nn.Module,
    report: ReportLike,
    source: ModelSource,
    slots: Mapping[str, Slot],
    ties: dict[str, str],
    files: dict[str, FileRecord],
) -> None:
    """Write the manifest, the last file of a directory, and flush the folders."""
    parameters = {name: slot.tensor for name, slot in slots.items() if slot.is_parameter and name not in ties}
    manifest = Manifest(
        source=source,
        files=files,
        converted=report.converted,
        recipe=report.recipe,
        backend=report.backend,
        parity=report.parity.to_dict(),
        training=model.training,
        training_exceptions=tuple(name for name, module in model.named_modules() if module.training != model.training),
        frozen=tuple(name for name, parameter in parameters.items() if not parameter.requires_grad),
        ties=ties,
        versions=installed_versions(with_transformers=source.kind == "transformers"),
    )
    write_bytes(directory / MANIFEST, manifest.to_json().encode())
    flush_folders(directory)


def flush_folders(directory: Path) -> None:
    """Flush the entries of a directory and of every folder in it to the disk."""
    for folder in (directory, *(path for path in directory.rglob("*") if path.is_dir())):
        _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _flush_rename(target: Path) -> None:
    """Flush the folder that holds the target; the directory is whole already, so a failure here is none of the write's."""
    with suppress(OSError):
        _flush_folder(target.parent)


def rename_into_place(temporary: Path, target: Path, force: bool) -> None:
    """Give a finished directory its name; with ``force`` the one that has it goes, and comes back when that fails."""
    if not (force and target.exists()):
        temporary.rename(target)
        _flush_rename(target)
        return
    aside = target.with_name(f".{target.name}.old-{secrets.token_hex(4)}")
    target.rename(aside)
    try:
        temporary.rename(target)
    except BaseException:
        aside.rename(target)
        raise
    _flush_rename(target)
    shutil.rmtree(aside, ignore_errors=True)
