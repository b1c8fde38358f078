"""What a GPU can do at most, from NVIDIA's datasheets, and which fraction of it large kernels reach.

Peaks are dense (the datasheets' figures with sparsity are halved), with accumulation in float32.  Sources, by name:

* a100, h100, h100-pcie, h200, h200-nvl, l4, l40s: the product's datasheet at nvidia.com/data-center.
* b200: Blackwell architecture brief; b300: Blackwell Ultra datasheet, FP4 and bandwidth as torchao's
  ``testing/training/roofline_utils.py`` has them.
* rtx4090, rtx5090: NVIDIA's Ada and RTX Blackwell architecture whitepapers (tables of peak rates).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from te_convert.errors import InputError
from te_convert.runtime.recipes import Version


@dataclass(frozen=True)
class Gpu:
    """A GPU's limits.

    Attributes:
        tflops: dense peak in 10^12 operations per second for "bf16", "fp8" and "fp4"; absent where the hardware has none.
        bandwidth_tb_s: of its memory, 10^12 bytes per second.
        memory_gb: 10^9 bytes.
        multiprocessors: what the tiles of a matrix product are spread over.
        generation: key of :data:`FRACTIONS`.
    """

    name: str
    capability: Version
    generation: str
    tflops: dict[str, float]
    bandwidth_tb_s: float
    memory_gb: float
    multiprocessors: int


@dataclass(frozen=True)
class Fractions:
    """Fractions of the peaks that large kernels reach.

    Attributes:
        gemm: by kind of product: "bf16", "fp8" (scales for whole tensors or blocks of 128), "mxfp8", "nvfp4".
        memory: of the bandwidth, in element-wise kernels.
        transposes: the tensor cores take FP8 operands in one layout only, so training writes a transposed copy of each tensor
            that has one scale.
        checked: some published row of benchmarks/estimate.py was measured on this generation.
    """

    gemm: dict[str, float]
    memory: float
    transposes: bool
    checked: bool


FRACTIONS: dict[str, Fractions] = {
    # Set so that the products alone (pre-quantised) of TE's gemm_profiling page are met, H200 NVL and B300; memory: torchao's
    # roofline_utils.py, "pct_achievable_mem_bw".
    "hopper": Fractions({"bf16": 0.746, "fp8": 0.711}, 0.92, True, True),
    "blackwell": Fractions({"bf16": 0.690, "fp8": 0.647, "mxfp8": 0.615, "nvfp4": 0.378}, 0.84, False, True),
    # Nothing published to fit: Hopper's, with FP4's from Blackwell.
    "ampere": Fractions({"bf16": 0.746}, 0.92, True, False),
    "ada": Fractions({"bf16": 0.746, "fp8": 0.711}, 0.92, True, False),
    "blackwell-desktop": Fractions({"bf16": 0.746, "fp8": 0.711, "nvfp4": 0.378}, 0.92, False, False),
}

GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", (8, 0), "ampere", {"bf16": 312}, 2.039, 80, 108),
        Gpu("l4", (8, 9), "ada", {"bf16": 121, "fp8": 242}, 0.300, 24, 58),
        Gpu("l40s", (8, 9), "ada", {"bf16": 362, "fp8": 733}, 0.864, 48, 142),
        Gpu("rtx4090", (8, 9), "ada", {"bf16": 165.2, "fp8": 330.3}, 1.008, 24, 128),
        Gpu("h100", (9, 0), "hopper", {"bf16": 989, "fp8": 1979}, 3.35, 80, 132),
        Gpu("h100-pcie", (9, 0), "hopper", {"bf16": 756, "fp8": 1513}, 2.0, 80, 114),
        Gpu("h200", (9, 0), "hopper", {"bf16": 989, "fp8": 1979}, 4.8, 141, 132),
        Gpu("h200-nvl", (9, 0), "hopper", {"bf16": 835.5, "fp8": 1671}, 4.8, 141, 132),
        Gpu("b200", (10, 0), "blackwell", {"bf16": 2250, "fp8": 4500, "fp4": 9000}, 8.0, 180, 148),
        Gpu("b300", (10, 3), "blackwell", {"bf16": 2250, "fp8": 4500, "fp4": 14000}, 8.0, 288, 148),
        Gpu("rtx5090", (12, 0), "blackwell-desktop", {"bf16": 209.5, "fp8": 419, "fp4": 1676}, 1.792, 32, 170),
    )
}


def find_gpu(name: str) -> Gpu:
    """The GPU of a name such as "h100" or "H200-NVL".

    Raises:
        InputError: not one of :data:`GPUS`.
    """
    gpu = GPUS.get(str(name).strip().lower().replace(" ", "-"))
    if gpu is None:
        raise InputError(f"no figures for a GPU called {name!r}", f"name one of {', '.join(GPUS)}")
    return gpu


def check_gpu(name: str | None) -> str:
    """Name of the GPU that :func:`chosen_gpu` takes, to ask before long work."""
    return chosen_gpu(name).name


def chosen_gpu(name: str | None) -> Gpu:
    """The named GPU, else the one in this machine.

    Raises:
        InputError: neither was named nor is there one that is known.
    """
    if name is not None:
        return find_gpu(name)
    here = _device_name()
    gpu = _gpu_of_device(here) if here else None
    if gpu is None:
        what = f"no figures for this machine's GPU ({here})" if here else "this machine has no GPU to estimate for"
        raise InputError(what, f"name one with gpu= (--gpu): {', '.join(GPUS)}")
    return gpu


def _device_name() -> str:
    """What the driver calls the current GPU, "" without one."""
    try:
        return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else ""
    except Exception:  # whatever a broken driver makes torch say; doctor tells
        return ""


def _gpu_of_device(device: str) -> Gpu | None:
    """The longest name of the table all of whose words the driver's name has ("NVIDIA H100 PCIe" is an h100-pcie)."""
    spelled = device.lower().replace(" ", "").replace("geforce", "")
    fitting = [gpu for gpu in GPUS.values() if all(word in spelled for word in gpu.name.split("-"))]
    return max(fitting, key=lambda gpu: len(gpu.name), default=None)
