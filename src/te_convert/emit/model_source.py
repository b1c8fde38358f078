"""Where a model comes from, as plain data: what to copy, and how to build the model again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from torch import nn

from te_convert.errors import LoadError

KINDS = ("file", "module", "transformers")


@dataclass(frozen=True)
class ModelSource:
    """How a model is built again without its weights.

    Attributes:
        kind: "file" (a Python file and its siblings), "module" (an installed module) or "transformers".
        entry: name in the file or module of the instance, function or class; for "transformers" the architecture class.
        main: the Python file's name, the module's dotted name, or "config.json".
        files: what is copied, as POSIX paths below ``source/``; nothing for "module".
        sha256: for "module", the digest of the module's file.
        dtype: for "transformers", the dtype in which the model is built.
        attention: for "transformers", the attention implementation that was active.
        content: the files' bytes; not part of :meth:`to_dict`.
        origins: the files as they lie on this machine, so that they are never overwritten; not part of :meth:`to_dict`.
    """

    kind: str
    entry: str
    main: str
    files: tuple[str, ...] = ()
    sha256: str = ""
    dtype: str = ""
    attention: str = ""
    content: Mapping[str, bytes] = field(default_factory=dict, repr=False, compare=False)
    origins: tuple[Path, ...] = field(default=(), repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without machine paths."""
        return {
            "kind": self.kind,
            "entry": self.entry,
            "main": self.main,
            "files": list(self.files),
            "sha256": self.sha256,
            "dtype": self.dtype,
            "attention": self.attention,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelSource:
        """The inverse of :meth:`to_dict`.

        Raises:
            LoadError: an unknown kind, missing or wrong fields, or a file name that points elsewhere.
        """
        texts = {key: data.get(key) for key in ("kind", "entry", "main", "sha256", "dtype", "attention")}
        files = data.get("files")
        if not all(isinstance(value, str) for value in texts.values()) or not isinstance(files, list):
            raise LoadError("manifest.json describes no model source", "convert the model again")
        if texts["kind"] not in KINDS:
            raise LoadError(f"unknown kind of model source {texts['kind']!r}", "use the te_convert version that wrote it")
        main = () if texts["kind"] == "module" else (texts["main"],)
        for name in (*files, *main):
            if not is_safe_name(name):
                raise LoadError(f"manifest.json names the file {name!r}, which is not inside the directory", "do not load it")
        fields: dict[str, Any] = dict(texts)
        return cls(files=tuple(files), **fields)


@dataclass(frozen=True)
class OpenedModel:
    """A model as it was opened, with the inputs that its source offers and the way to build it again."""

    model: nn.Module
    example_inputs: Any | None
    source: ModelSource


def is_safe_name(name: object) -> bool:
    """True for a relative POSIX path without ``..``, a drive, a backslash or a needless part."""
    if not isinstance(name, str) or not name or any(char in name for char in "\\:\0"):
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and path.parts != () and str(path) == name
