"""manifest.json: what a converted directory holds and how the model is put together again."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from te_convert.emit.model_source import ModelSource, is_safe_name
from te_convert.errors import LoadError

MANIFEST = "manifest.json"
MANIFEST_SCHEMA = 1
_AGAIN = "convert the model again"


@dataclass(frozen=True)
class FileRecord:
    """Digest and size in bytes of one file."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """The contents of manifest.json.

    Attributes:
        source: how the model is built again.
        files: every other file of the directory by POSIX name.
        converted: True when at least one site was converted.
        recipe: the recipe asked for, or None.
        backend: the backend on which the conversion was verified.
        parity: the figures of verification.
        training: the root module's training flag.
        training_exceptions: modules whose flag is the other one.
        frozen: parameters that do not require a gradient.
        ties: further names of a stored tensor → the name under which it is stored.
        versions: of this package, PyTorch, Transformer Engine and so on; None where not installed.
    """

    source: ModelSource
    files: dict[str, FileRecord]
    converted: bool
    recipe: str | None
    backend: str
    parity: dict[str, Any]
    training: bool
    training_exceptions: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    ties: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)

    def to_json(self) -> str:
        """The manifest as indented JSON text; a figure that is not finite becomes a string."""
        data = {
            "schema": MANIFEST_SCHEMA,
            "created_by": f"te_convert {self.versions.get('te_convert') or 'unknown'}",
            "versions": self.versions,
            "converted": self.converted,
            "recipe": self.recipe,
            "backend": self.backend,
            "parity": self.parity,
            "source": self.source.to_dict(),
            "training": self.training,
            "training_exceptions": list(self.training_exceptions),
            "frozen": list(self.frozen),
            "ties": self.ties,
            "files": {name: {"sha256": record.sha256, "size": record.size} for name, record in self.files.items()},
        }
        return json.dumps(_plain(data), indent=1) + "\n"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Manifest:
        """The inverse of :meth:`to_json`, parsed.

        Raises:
            LoadError: an unknown schema, missing or wrong fields, or a file name that points elsewhere.
        """
        if data.get("schema") != MANIFEST_SCHEMA:
            message = f"{MANIFEST} has schema {data.get('schema')!r}; this version reads {MANIFEST_SCHEMA}"
            raise LoadError(message, "use the te_convert version that wrote it")
        try:
            manifest = cls(
                source=ModelSource.from_dict(data["source"]),
                files={name: FileRecord(str(f["sha256"]), int(f["size"])) for name, f in data["files"].items()},
                converted=bool(data["converted"]),
                recipe=data["recipe"],
                backend=str(data["backend"]),
                parity=dict(data["parity"]),
                training=bool(data["training"]),
                training_exceptions=_strings(data["training_exceptions"]),
                frozen=_strings(data["frozen"]),
                ties={str(name): str(stored) for name, stored in data["ties"].items()},
                versions=dict(data["versions"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LoadError(f"{MANIFEST} is damaged: {type(error).__name__}: {error}", _AGAIN) from None
        for name in manifest.files:
            if not is_safe_name(name):
                raise LoadError(f"{MANIFEST} names the file {name!r}, which is not inside the directory", "do not load it")
        return manifest


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a converted directory.

    Raises:
        LoadError: no such directory, no manifest, not JSON, an unknown schema, or damaged.
    """
    if not directory.is_dir():
        state = "is not a directory" if directory.exists() else "does not exist"
        raise LoadError(f"{directory} {state}", "give a directory that te_convert wrote")
    path = directory / MANIFEST
    if path.is_symlink() or not path.is_file():
        raise LoadError(f"{directory} is not a converted directory: it has no {MANIFEST}", "give a directory that te_convert wrote")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path} is not readable JSON: {error}", _AGAIN) from None
    if not isinstance(data, dict):
        raise LoadError(f"{path} is not readable JSON: no object", _AGAIN)
    return Manifest.from_dict(data)


def installed_versions(with_transformers: bool) -> dict[str, str | None]:
    """Versions that explain a directory later; None where a package is not installed."""
    names = {
        "te_convert": "te-convert",
        "torch": "torch",
        "transformer_engine": "transformer-engine",
        "safetensors": "safetensors",
    }
    if with_transformers:
        names["transformers"] = "transformers"
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for key, distribution in names.items():
        try:
            versions[key] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            versions[key] = None
    return versions


def _strings(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise TypeError(f"expected a list of names, found {type(values).__name__}")
    return tuple(str(value) for value in values)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
