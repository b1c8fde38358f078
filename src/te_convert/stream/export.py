"""The way back: a converted directory or a live model as a checkpoint in the original's names, shapes and order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import torch
from torch import nn

from te_convert.config import Progress
from te_convert.emit.load import check_files
from te_convert.emit.manifest import Manifest, read_manifest
from te_convert.emit.slots import find_slots, find_ties
from te_convert.emit.sources import rebuild, source_of
from te_convert.emit.tensors_file import INDEX, name_shards, plan_shards, tensor_bytes, write_bytes, write_tensors
from te_convert.emit.transformers_dir import tied
from te_convert.emit.write import SHARD_BYTES, check_out, flush_folders, index_json, rename_into_place
from te_convert.errors import InputError, LoadError
from te_convert.plan.model import Plan
from te_convert.rewrite.apply import apply_plan
from te_convert.rewrite.state import original_state_dict
from te_convert.stream.checkpoint import Checkpoint, open_checkpoint
from te_convert.stream.ledger import LEDGER, read_ledger
from te_convert.stream.outline import parameters_on_meta
from te_convert.stream.pieces import Layout, invert, whole
from te_convert.stream.staging import Staging
from te_convert.stream.targets import find_targets
from te_convert.stream.writer import ShardWriter


def export_directory(
    directory: Path,
    out: Path,
    *,
    resume: bool = False,
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Path:
    """Write the weights of a converted directory in the original's layout, tensor by tensor, beside the files of its source.

    For a Transformers model the result is a directory that ``from_pretrained`` reads, with the checkpoint's own names where
    the conversion streamed them.  Values are the directory's, bit for bit.

    Args:
        directory: what te-convert or :func:`te_convert.save` wrote.
        out: the directory to write.
        resume: go on from an unfinished run.
        force: replace ``out`` when it exists.
        shard_bytes: most bytes of one file.
        progress: called with ("stream", bytes written, bytes in all).

    Raises:
        LoadError: the directory is damaged, or its source changed.
        InputError: ``out`` exists or cannot be written.
    """
    check_out(out, force)
    if directory.resolve().is_relative_to(out.resolve()):
        state = "is" if directory.resolve() == out.resolve() else "holds"
        raise InputError(f"{out} {state} the converted directory itself", "choose another --out")
    manifest = read_manifest(directory)
    check_files(directory, manifest)
    with closing(open_checkpoint(directory)) as checkpoint:
        layouts = _layouts(directory, manifest, checkpoint)
        sizes = {name: layout.size for name, layout in layouts.items()}
        shards = name_shards(plan_shards(sizes, shard_bytes))
        text = json.dumps([[name, t.shape, [p.__dict__ for p in t.pieces]] for name, t in layouts.items()], default=list)
        records = {name: record.sha256 for name, record in manifest.files.items()}
        job = {"files": records, "job": hashlib.sha256((text + json.dumps(shards)).encode()).hexdigest()}
        with Staging(out.absolute(), job, resume).locked() as staging:
            report = (lambda done, total: progress("stream", done, total)) if progress is not None else (lambda done, total: None)
            writer = ShardWriter(staging, checkpoint, report, sum(sizes.values()))
            writer.write(shards, layouts)
            content = {name: (directory / "source" / name).read_bytes() for name in manifest.source.files}
            _finish(staging.path, shards, sum(sizes.values()), content)
            rename_into_place(staging.path, out.absolute(), force)
    return out


def _layouts(directory: Path, manifest: Manifest, checkpoint: Checkpoint) -> dict[str, Layout]:
    """The original's tensors as pieces of the directory's: from the ledger of a streamed conversion, else from the plan."""
    if LEDGER in manifest.files:
        made, sources = read_ledger(directory / LEDGER, checkpoint)
    else:
        made, sources = _from_plan(directory, manifest, checkpoint)
    missing = made.keys() - checkpoint.entries.keys()
    if missing:
        raise LoadError(f"the directory has no {', '.join(sorted(missing)[:4])}", "convert the model again")
    try:
        found = invert(made, sources)
    except ValueError as error:
        raise LoadError(f"the plan does not fit the weights: {error}", "convert the model again") from None
    return {name: Layout(_dtype(layout, checkpoint), layout.shape, layout.pieces) for name, layout in found.items()}


def _dtype(layout: Layout, checkpoint: Checkpoint) -> torch.dtype:
    return checkpoint.entries[layout.pieces[0].source].dtype if layout.pieces else layout.dtype


def _from_plan(
    directory: Path, manifest: Manifest, checkpoint: Checkpoint
) -> tuple[dict[str, Layout], dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
    plan = Plan.from_dict(json.loads((directory / "plan.json").read_text(encoding="utf-8")))
    with torch.random.fork_rng(devices=[]), parameters_on_meta():
        model = tied(rebuild(manifest.source, directory))
    slots = find_slots(model)
    public = slots.keys() & model.state_dict().keys()
    ties = find_ties(slots, public)
    original = {n: whole(n, s.tensor.dtype, tuple(s.tensor.shape)) for n, s in slots.items() if n in public and n not in ties}
    names = {name: ties.get(name, name) for name in slots}
    targets = find_targets(apply_plan(model, plan, "reference").model, plan, original, names)
    sources = {name: (layout.dtype, layout.shape) for name, layout in original.items()}
    return targets.weights, sources


def export_model(model: nn.Module, out: Path, *, force: bool = False, shard_bytes: int = SHARD_BYTES) -> Path:
    """Write a live model's weights in the original's layout, with config.json where it is a Transformers model.

    Tied tensors are written once, under their first name.

    Raises:
        InputError: ``out`` exists or cannot be written, or a tensor is no plain one.
    """
    check_out(out, force)
    state: dict[str, torch.Tensor] = {}
    seen: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
    for name, tensor in original_state_dict(model).items():
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            raise InputError(f"{name} is no tensor with values", "export a model with weights")
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if not tensor.numel() or seen.setdefault(key, name) == name:
            state[name] = tensor
    source = source_of(model)
    sizes = {name: tensor_bytes(tensor) for name, tensor in state.items()}
    shards = name_shards(plan_shards(sizes, shard_bytes))
    with Staging(out.absolute(), {}, resume=False).locked() as staging:
        for file, names in shards:
            write_tensors(staging.path / file, {name: state[name] for name in names})
        _finish(staging.path, shards, sum(sizes.values()), source.content if source is not None else {})
        rename_into_place(staging.path, out.absolute(), force)
    return out


def _finish(path: Path, shards: list[tuple[str, list[str]]], total: int, content: Mapping[str, bytes]) -> None:
    if len(shards) > 1:
        write_bytes(path / INDEX, index_json({name: file for file, names in shards for name in names}, total).encode())
    for name, data in content.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path / name, data)
    flush_folders(path)
