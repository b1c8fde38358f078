"""A Transformers directory converted shard by shard: plan on meta, prove a slice, stream the weights, write a directory."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from te_convert.config import ConvertConfig
from te_convert.emit.manifest import FileRecord
from te_convert.emit.slots import find_slots
from te_convert.emit.tensors_file import BUFFERS, INDEX, name_shards, plan_shards, write_bytes, write_tensors
from te_convert.emit.transformers_dir import open_outline
from te_convert.emit.write import SHARD_BYTES, check_out, index_json, rename_into_place, write_manifest, write_texts
from te_convert.errors import ConversionError, InputError
from te_convert.pipeline import observe
from te_convert.plan.choose import make_plan
from te_convert.plan.model import Plan
from te_convert.replacements.specs import dtype_name
from te_convert.report.build import report_of
from te_convert.report.model import Report
from te_convert.rewrite.apply import apply_plan
from te_convert.runtime.backend import choose_backend
from te_convert.stream.checkpoint import CHUNK_BYTES, Checkpoint, open_checkpoint
from te_convert.stream.ledger import LEDGER, write_ledger
from te_convert.stream.outline import Names, parameters_on_meta
from te_convert.stream.pieces import Layout, invert
from te_convert.stream.repeat import plan_from_shallow
from te_convert.stream.slice import SliceResult, digest_of, read_layout, refuse_like, verify_slice
from te_convert.stream.staging import Staging
from te_convert.stream.targets import Targets, find_targets, from_checkpoint
from te_convert.stream.writer import ShardWriter
from te_convert.verify.model import Parity

SLICE_BYTES = 2_000_000_000


@dataclass(frozen=True)
class Streamed:
    """What :func:`convert_checkpoint` did.

    Attributes:
        path: the directory that was written.
        report: as convert's; ``report.parity.status`` is "slice" when a shallow model held.
        plan: the decisions.
    """

    path: Path
    report: Report
    plan: Plan

    @property
    def converted(self) -> bool:
        """True when at least one site was converted."""
        return self.report.converted


def convert_checkpoint(
    directory: Path,
    out: Path,
    config: ConvertConfig,
    *,
    dtype: torch.dtype | None = None,
    resume: bool = False,
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
    slice_bytes: int = SLICE_BYTES,
) -> Streamed:
    """Convert a Transformers directory without having its weights in memory.

    Every tensor passes through a few buffers of 2 MB; only a weight that is stored transposed is in memory as a whole.  The
    directory is made in a hidden sibling and renamed at the end; shards that were finished before a crash are kept for ``resume``.

    Args:
        directory: config.json and safetensors (one file or an index), or torch files that hold tensors only.
        out: the directory to write.
        config: the choices of :func:`te_convert.convert`.
        dtype: dtype to write floating-point tensors in; None keeps each as it is.
        resume: go on from an unfinished run with the same files and options.
        force: replace ``out`` when it exists.
        shard_bytes: most bytes of one file.
        slice_bytes: most bytes of weights in memory for verification.

    Raises:
        InputError: a damaged or incomplete checkpoint, an architecture that Transformers does not have, weights that cannot be
            streamed, or a disk that fails; ``out`` is untouched.
        ConversionError: ``config.strict`` and something was put back or not verified.
    """
    timings: dict[str, float] = {}
    opened = open_outline(directory, parameters_on_meta())
    check_out(out, force, opened.source)
    with closing(open_checkpoint(directory)) as checkpoint:
        model = opened.model
        _refuse_quantised(directory, model, checkpoint)
        names = Names(model, checkpoint)
        apart = untie(model, names.stored, checkpoint)
        stored = _written_as(names, dtype, apart)
        start = time.perf_counter()
        _, captured, notes = observe(model, (), config)
        plan = make_plan(model, captured, config, notes)
        if not captured.has_graph and plan.converting:
            plan = plan_from_shallow(model, plan, config, slice_bytes)
        timings["plan"] = time.perf_counter() - start
        backend = choose_backend(config.backend, "cpu")
        canonical = canonical_names(model, stored)
        start = time.perf_counter()
        found = SliceResult(Parity("not-verified", backend.name, notes=("nothing was compared",)))
        if config.verify and plan.converting:
            found = verify_slice(model, plan, _loader(stored, canonical, checkpoint), backend.name, slice_bytes)
            plan = refuse_like(plan, found.refused)
        timings["verify"] = time.perf_counter() - start
        if not plan.converting and not found.refused:
            raise InputError("nothing in this model can be converted", "te-convert analyze says why")
        if (
            found.parity.status == "failed"
            or not plan.converting
            or (config.strict and (found.refused or found.parity.status != "slice"))
        ):
            raise ConversionError(
                f"parity of the slice: {found.parity.status}", "te-convert check explains it; nothing was written"
            )
        applied = apply_plan(model, plan, "reference")
        targets = find_targets(applied.model, plan, stored.layouts, canonical)
        job = Job(checkpoint, targets, stored, found, shard_bytes)
        plan = replace(plan, notes=(*plan.notes, *stored.notes))
        staging = Staging(out.absolute(), job.description(plan), resume)
        with staging.locked():
            start = time.perf_counter()
            files = job.stream(staging, lambda done, total: config.report_progress("stream", done, total))
            timings["stream"] = time.perf_counter() - start
            report = report_of(plan, found.parity, config, backend, timings)
            files |= write_texts(staging.path, plan, report, opened.source)
            files[BUFFERS] = write_tensors(staging.path / BUFFERS, targets.buffers)
            write_manifest(staging.path, applied.model, report, opened.source, find_slots(applied.model), targets.ties, files)
            rename_into_place(staging.path, out.absolute(), force)
    return Streamed(out, report, plan)


@dataclass(frozen=True)
class Stored:
    """The checkpoint's tensors as the model's, in the dtype to write.

    Attributes:
        layouts: parameter or persistent buffer → its pieces.
        notes: what is not carried over.
    """

    layouts: dict[str, Layout]
    notes: tuple[str, ...]


def _written_as(names: Names, dtype: torch.dtype | None, apart: list[str]) -> Stored:
    layouts = {
        name: replace(layout, dtype=dtype) if dtype is not None and layout.dtype.is_floating_point else layout
        for name, layout in names.stored.items()
    }
    notes = []
    if names.ignored:
        some = ", ".join(names.ignored[:5]) + (", …" if len(names.ignored) > 5 else "")
        notes.append(f"{len(names.ignored)} tensors of the checkpoint have no place in the model and were left out: {some}")
    if apart:
        notes.append(f"config.json ties {', '.join(apart)}, which has values of its own in the checkpoint: it was not tied")
    return Stored(layouts, tuple(notes))


def _refuse_quantised(directory: Path, model: nn.Module, checkpoint: Checkpoint) -> None:
    """Stored codes and scales are no weights: copying them would give another model."""
    told: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    narrow = [name for name, entry in checkpoint.entries.items() if entry.dtype.is_floating_point and entry.dtype.itemsize == 1]
    if told or narrow:
        why = "quantization_config in config.json" if told else f"{narrow[0]} is {dtype_name(checkpoint.entries[narrow[0]].dtype)}"
        raise InputError(f"{directory} holds quantised weights ({why})", "give a checkpoint in bfloat16, float16 or float32")


def untie(model: nn.Module, stored: dict[str, Layout], checkpoint: Checkpoint) -> list[str]:
    """Give weights that config.json ties, and the checkpoint has with different values, parameters of their own.

    Transformers does the same when it loads.  Of those that are equal, all but one leave ``stored``.

    Returns:
        The names that are no longer tied.
    """
    apart = []
    first: dict[int, str] = {}
    for name, slot in find_slots(model).items():
        other = first.setdefault(id(slot.tensor), name) if name in stored else name
        if other == name:
            continue
        if digest_of(stored[name], checkpoint) == digest_of(stored[other], checkpoint):
            del stored[name]
            continue
        slot.replace(nn.Parameter(slot.tensor.detach().clone(), slot.tensor.requires_grad))
        apart.append(name)
    return apart


def canonical_names(model: nn.Module, stored: Stored) -> dict[str, str]:
    """Every name of a tensor of the model → the one of them that the checkpoint has."""
    groups: dict[int, list[str]] = {}
    for name, slot in find_slots(model).items():
        groups.setdefault(id(slot.tensor), []).append(name)
    return {name: next((n for n in group if n in stored.layouts), name) for group in groups.values() for name in group}


def _loader(stored: Stored, canonical: Mapping[str, str], checkpoint: Checkpoint) -> Any:
    def load(name: str, shape: torch.Size) -> tuple[torch.Tensor, bool] | None:
        layout = stored.layouts.get(canonical.get(name, name))
        if layout is None or layout.shape[1:] != tuple(shape[1:]) or len(layout.shape) != len(shape):
            return None
        if layout.shape == tuple(shape):
            return read_layout(layout, checkpoint), True
        return (read_layout(layout, checkpoint, shape[0]), False) if layout.shape[0] > shape[0] else None

    return load


class Job:
    """What is streamed: tensors in TE's layout as pieces of the checkpoint's, over shards."""

    def __init__(self, checkpoint: Checkpoint, targets: Targets, stored: Stored, found: SliceResult, shard_bytes: int) -> None:
        self._checkpoint, self._slice = checkpoint, found
        self.weights = from_checkpoint(targets.weights, stored.layouts)
        used = {piece.source for layout in stored.layouts.values() for piece in layout.pieces}
        self.sources = {key: entry for key, entry in checkpoint.entries.items() if key in used}
        # Raises where an element of the checkpoint would be lost or written twice.
        invert(self.weights, {key: (entry.dtype, entry.shape) for key, entry in self.sources.items()})
        sizes = {name: layout.size for name, layout in self.weights.items()}
        self.shards = name_shards(plan_shards(sizes, shard_bytes))
        self.total = sum(sizes.values())
        self._files = self._state()

    def _state(self) -> dict[str, list[int]]:
        """Size and time of the checkpoint's files."""
        return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in self._checkpoint.files if path.is_file()}

    def description(self, plan: Plan) -> dict[str, Any]:
        """What has to be the same for an unfinished run to be taken up."""
        weights = {name: [str(t.dtype), t.shape, [p.__dict__ for p in t.pieces]] for name, t in self.weights.items()}
        digest = hashlib.sha256(json.dumps([weights, self.shards, plan.to_dict()], sort_keys=True, default=list).encode())
        return {"files": self._files, "job": digest.hexdigest()}

    def stream(self, staging: Staging, progress: Any) -> dict[str, FileRecord]:
        """Write every shard, the index and the ledger; compare with the slice.

        Raises:
            InputError: reading or writing fails.
            ConversionError: a tensor differs from the one that the slice was verified with.
        """
        writer = ShardWriter(staging, self._checkpoint, progress, self.total)
        records = writer.write(self.shards, self.weights)
        if self._state() != self._files:
            raise InputError("the checkpoint's files changed while they were read", "convert it again when they are complete")
        files = {record.file: record.record for record in records}
        if len(self.shards) > 1:
            weight_map = {name: file for file, names in self.shards for name in names}
            files[INDEX] = write_bytes(staging.path / INDEX, index_json(weight_map, self.total).encode())
        self._compare_with_slice(staging.path)
        files[LEDGER] = write_bytes(staging.path / LEDGER, write_ledger(self.weights, self.sources, records).encode())
        return files

    def _compare_with_slice(self, path: Path) -> None:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        with closing(open_checkpoint(path)) as written:
            for name, digest in self._slice.digests.items():
                if name not in written.entries:
                    continue
                found = hashlib.sha256()
                for part in written.chunks(name, 0, written.entries[name].size, buffer):
                    found.update(part)
                if found.hexdigest() != digest:
                    raise ConversionError(f"{name} was streamed otherwise than it was verified", "report this; use --no-stream")
