"""The public functions for checkpoints: convert one shard by shard, and write the original's layout back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from te_convert.config import DTYPES, ConvertConfig, Progress, patterns
from te_convert.emit.write import SHARD_BYTES
from te_convert.errors import InputError
from te_convert.replacements.specs import torch_dtype
from te_convert.stream.convert import SLICE_BYTES, Streamed
from te_convert.stream.convert import convert_checkpoint as stream_directory
from te_convert.stream.export import export_directory, export_model


def convert_checkpoint(
    directory: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    resume: bool = False,
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
    slice_bytes: int = SLICE_BYTES,
    recipe: str | None = None,
    backend: str = "auto",
    fuse: bool = True,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    allow: str | Sequence[str] = (),
    verify: bool = True,
    strict: bool = False,
    progress: Progress | None = None,
) -> Streamed:
    """Convert a Transformers directory shard by shard, in memory that does not grow with the model.

    The model is planned without weights; a shallow model with the real weights of the first layers is compared with its
    original; then the tensors are streamed into TE's layout.  See docs/checkpoints.md.

    Args:
        directory: config.json and safetensors (one file or an index), or torch files that hold tensors only.
        out: the directory to write, which :func:`load` reads.
        dtype: "float32", "bfloat16" or "float16" for every floating-point tensor; None keeps each as it is.
        resume: go on from an unfinished run with the same files and options.
        force: replace ``out`` when it exists.
        shard_bytes: most bytes of one file.
        slice_bytes: most bytes of weights in memory for verification.
        recipe: as for :func:`convert`, and so are the following.
        backend: what the shallow model runs on.
        fuse: let several modules become one.
        include: FQN globs.
        exclude: FQN globs.
        allow: named approximations.
        verify: compare the shallow model.
        strict: raise instead of writing what is not verified.
        progress: called with (stage, done, total); "stream" counts bytes.

    Raises:
        InputError: a checkpoint that is damaged, incomplete or cannot be streamed, or a disk that fails; ``out`` is untouched.
        ConversionError: the slice failed, or ``strict`` and it could not be compared.
        EnvironmentLacksError: Transformers is not installed, or ``backend="te"`` where TE cannot run.
    """
    config = ConvertConfig(
        recipe=recipe,
        backend=backend,
        fuse=fuse,
        verify=verify,
        strict=strict,
        progress=progress,
        **patterns(include, exclude, allow),
    )
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}", f"use one of {', '.join(DTYPES)}")
    return stream_directory(
        Path(directory),
        Path(out),
        config,
        dtype=None if dtype is None else torch_dtype(dtype),
        resume=resume,
        force=force,
        shard_bytes=shard_bytes,
        slice_bytes=slice_bytes,
    )


def export(
    model: nn.Module | str | Path, out: str | Path, *, resume: bool = False, force: bool = False, progress: Progress | None = None
) -> Path:
    """Write weights in the original's names and layout: the way back out of a converted directory or a live converted model.

    For Transformers models ``out`` is a directory that ``from_pretrained`` reads.

    Args:
        model: a converted directory (streamed tensor by tensor), or a model, trained since or not.
        out: the directory to write.
        resume: go on from an unfinished export of a directory.
        force: replace ``out`` when it exists.
        progress: called with (stage, done, total).

    Raises:
        LoadError: a directory that is damaged, or whose source changed.
        InputError: ``out`` exists or cannot be written.
    """
    if isinstance(model, nn.Module):
        return export_model(model, Path(out), force=force)
    return export_directory(Path(model), Path(out), resume=resume, force=force, progress=progress)
