"""Installed distributions of Transformer Engine and of what it needs, from their metadata: nothing is imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

CORES = ("transformer-engine-cu12", "transformer-engine-cu13")
"""In the order in which Transformer Engine looks them up."""
NEEDS = ("numpy", "pydantic", "packaging", "einops", "onnx", "onnxscript", "triton")
"""What ``import transformer_engine.pytorch`` (2.20) imports besides torch."""


NVIDIA = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
"""Libraries that torch's CUDA builds bring as packages."""


@dataclass(frozen=True)
class Packages:
    """Versions by distribution.

    Attributes:
        te: of ``transformer-engine``, None when it is not there.
        cores: of those in :data:`CORES` that are there, by name.
        extension: of ``transformer-engine-torch``.
        needs: of :data:`NEEDS`, None for those that are not there.
        nvidia: of those in :data:`NVIDIA` that are there, by name.
    """

    te: str | None = None
    cores: dict[str, str] = field(default_factory=dict)
    extension: str | None = None
    needs: dict[str, str | None] = field(default_factory=dict)
    nvidia: dict[str, str] = field(default_factory=dict)


def find_packages(path: Sequence[str] | None = None) -> Packages:
    """What is installed on ``path`` (None for this process's); metadata that cannot be read counts as not there."""
    places: dict[str, Any] = {} if path is None else {"path": list(path)}

    def version(name: str) -> str | None:
        try:
            found: Any = next((each.version for each in metadata.distributions(name=name, **places)), None)
            return None if found is None else str(found)
        except Exception:  # a dist-info folder without metadata, a folder on the path that cannot be read
            return None

    return Packages(
        te=version("transformer-engine"),
        cores={name: found for name in CORES if (found := version(name)) is not None},
        extension=version("transformer-engine-torch"),
        needs={name: version(name) for name in NEEDS},
        nvidia={name: found for name in NVIDIA if (found := version(name)) is not None},
    )
