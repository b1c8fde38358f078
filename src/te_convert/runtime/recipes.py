"""Which low-precision recipes a GPU generation has, why not the others, and which one "fp8" takes.

The conditions are those of Transformer Engine 2.20, ``pytorch/quantization.py``: ``check_fp8_support`` (compute capability 8.9;
on 8.9 itself CUDA 12.1), ``check_fp8_block_scaling_support`` (9.0 and CUDA 12.9), ``check_mxfp8_support`` (10.x and 11.x) and
``check_nvfp4_support`` (10.0).  Hardware: 8.9 is Ada, 9.0 Hopper, 10.x Blackwell for data centres, 12.x Blackwell for desktops
(NVIDIA's table of CUDA GPUs).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from te_convert.runtime.probe import TransformerEngineProbe

Version = tuple[int, int]
"""A compute capability, or a CUDA version."""


@dataclass(frozen=True)
class Conditions:
    """What a recipe asks for.

    Attributes:
        name: TE's class of the recipe.
        least: smallest compute capability.
        below: first compute capability that does not have it any more, or None.
        cuda: smallest CUDA version that torch has to be built for, or None.
    """

    name: str
    least: Version
    below: Version | None = None
    cuda: Version | None = None


CONDITIONS: dict[str, Conditions] = {
    "fp8-delayed": Conditions("DelayedScaling", (8, 9)),
    "fp8-current": Conditions("Float8CurrentScaling", (8, 9)),
    "fp8-block": Conditions("Float8BlockScaling", (9, 0), cuda=(12, 9)),
    "mxfp8": Conditions("MXFP8BlockScaling", (10, 0), below=(12, 0)),
    "nvfp4": Conditions("NVFP4BlockScaling", (10, 0)),
}
_CUDA_ON_ADA: Version = (12, 1)
_BF16: Version = (8, 0)  # check_bf16_support
BEST = ("mxfp8", "fp8-current", "fp8-delayed")
"""What "fp8" takes, the first that there is.

MXFP8 has a scale for every 32 values.  Of the two that scale whole tensors, current scaling takes each tensor's own scale; delayed
scaling guesses it from earlier steps, keeps that history as a pickle in the state dict, and runs a module once for each step.
"""


def why_unavailable(recipe: str, capability: Version, cuda: Version | None) -> str:
    """Why a GPU cannot run a recipe, as one clause, or "" when it can.

    Args:
        recipe: None of "bf16" and "fp8": a key of :data:`CONDITIONS`, or "fp8" for any of :data:`BEST`.
        capability: compute capability of the GPU.
        cuda: CUDA version of this torch, None when it has none.
    """
    if recipe == "fp8":
        lacking = [why_unavailable(name, capability, cuda) for name in BEST]
        return lacking[-1] if all(lacking) else ""
    wanted = CONDITIONS[recipe]
    has = f"this GPU has {_text(capability)}"
    if capability < wanted.least:
        return f"{recipe} needs compute capability {_text(wanted.least)}; {has}"
    if wanted.below is not None and capability >= wanted.below:
        return f"{recipe} needs a compute capability below {_text(wanted.below)}; {has}"
    least = max(filter(None, (wanted.cuda, _CUDA_ON_ADA if capability == (8, 9) else None)), default=None)
    if least is not None and (cuda is None or cuda < least):
        return f"{recipe} needs CUDA {_text(least)}; this torch has {'none' if cuda is None else _text(cuda)}"
    return ""


def best_recipe(capability: Version, cuda: Version | None) -> str | None:
    """What "fp8" is on a GPU, or None when it has no FP8."""
    return next((name for name in BEST if not why_unavailable(name, capability, cuda)), None)


def why_not_here(recipe: str | None) -> str:
    """:func:`why_unavailable` for the current GPU; "" also where there is none that could be asked, and in high precision."""
    if recipe in (None, "bf16"):
        return ""
    capability = current_capability()
    return "" if capability is None else why_unavailable(str(recipe), capability, torch_cuda())


def current_capability() -> Version | None:
    """Compute capability of the current GPU, None without one."""
    import torch  # not at the top: doctor works where torch does not import

    try:
        return torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    except Exception:  # whatever a broken driver makes torch say; doctor tells
        return None


def torch_cuda() -> Version | None:
    """CUDA version that torch was built for."""
    import torch

    return parse_cuda(torch.version.cuda)


def parse_cuda(version: str | None) -> Version | None:
    """``torch.version.cuda`` as a version; None for a build without CUDA."""
    if version is None:
        return None
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def why_recipe_fails(recipe: str, probe: TransformerEngineProbe) -> str:
    """Why a recipe would not run on the GPUs that the probe saw, with the Transformer Engine that it imported, or "".

    Args:
        recipe: any of ``config.RECIPES``.
        probe: one that saw a GPU.
    """
    cuda = parse_cuda(probe.torch.cuda)
    for gpu in probe.torch.gpus:
        if gpu.capability < _BF16:
            return f"{recipe} needs compute capability {_text(_BF16)}; this GPU has {_text(gpu.capability)}"
        why = "" if recipe == "bf16" else why_unavailable(recipe, gpu.capability, cuda)
        if why:
            return why
        taken = best_recipe(gpu.capability, cuda) if recipe == "fp8" else recipe
        name = CONDITIONS[taken].name if taken in CONDITIONS else None
        if probe.recipes and name is not None and name not in probe.recipes:
            return f"{recipe} needs {name}, which Transformer Engine {probe.version or ''} does not have".replace("  ", " ")
    return ""


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
