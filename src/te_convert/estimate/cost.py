"""Time of a work item, in the eager original, on TE in high precision, and on TE in a recipe."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from te_convert.config import RECIPES
from te_convert.estimate.gpus import FRACTIONS, Gpu
from te_convert.estimate.kernels import FORMATS, LAUNCH_US, Product, attention_us, gemm_us, memory_us, quantise_us
from te_convert.estimate.work import Work

EAGER_OP_US, LINEAR_HOST_US = 6.0, 17.6
"""Time that Python and PyTorch take to issue an element-wise operation, and ``nn.Linear``.

The second is NVIDIA/TransformerEngine#445 (bs 1024, hidden 1024: 0.176 ms for ten, GPU idle in between); #2053 measured 13.5 on
another H100 machine.  The first: about a third of a Linear's call has no dispatch of its own."""

TE_HOST_US, TE_RECIPE_HOST_US = 57.4, 207.2
"""Time to issue a forward of ``te.Linear``, in high precision and in FP8: #445 again, 0.574 and 2.07 ms for ten.

That was TE 0.12 of 2023.  Its maintainers say that this has become much less since (#2126), without figures for FP8; with these,
small shapes are judged too badly rather than too well."""

# Bytes per element that a norm reads and writes: forward, forward and backward.
_FUSED_NORM = (4, 14)
"""One kernel: x and y; then x and dy for dx, and again for the weight's gradient.  TE's, and torch's for its own classes."""
_PYTHON_NORM, _PYTHON_NORM_KERNELS = (36, 108), 7
"""The seven operations of Transformers' LlamaRMSNorm.forward, most in float32: to, pow, mean, rsqrt, mul, to, mul; twice as much
backward."""
# Bytes per element of an activation's output.
_ACTIVATION, _GATE = (4, 10), (6, 16)
"""One kernel reads and writes; its backward reads two and writes one.  The product with the other half reads two, writes one; its
backward reads three and writes two."""
# Bytes per element of the score matrix in eager attention, between its two products.
_SCORES, _SCORE_KERNELS = (18, 44), 4
"""Written by the first product, scaled, masked or dropped out, softmax, read by the second (2 + 4 + 4 + 4 + 2, and the mask); the
backward of each reads two and writes one."""


@dataclass(frozen=True)
class Times:
    """GPU time of one step by what it is spent on, and the host's time to issue it; microseconds."""

    gemm_us: float = 0.0
    quantise_us: float = 0.0
    attention_us: float = 0.0
    memory_us: float = 0.0
    host_us: float = 0.0

    @property
    def gpu_us(self) -> float:
        """What the GPU is busy for."""
        return self.gemm_us + self.quantise_us + self.attention_us + self.memory_us

    @property
    def step_us(self) -> float:
        """The longer of the two: the host runs ahead of the GPU."""
        return max(self.gpu_us, self.host_us)

    def __add__(self, other: Times) -> Times:
        return Times(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, factor: float) -> Times:
        return Times(*(getattr(self, f.name) * factor for f in fields(self)))

    def to_dict(self) -> dict[str, float]:
        """Plain JSON values, with the step's time."""
        values = {f.name: round(getattr(self, f.name), 3) for f in fields(self)}
        return {**values, "step_us": round(self.step_us, 3)}


def takes_recipe(work: Work, recipe: str | None) -> bool:
    """Whether TE would compute an item's products in a recipe: it has some, the plan lets it, and its features are aligned."""
    alignment = RECIPES.get(recipe) if recipe is not None else None
    if alignment is None or work.high or not work.converted:
        return False
    sizes = {size for product in work.te_products for size in (product.ins, product.outs)}
    return bool(sizes) and all(size % alignment.features == 0 for size in sizes)


def original_times(gpu: Gpu, work: Work, training: bool) -> Times:
    """The eager original in bfloat16."""
    norm_bytes = (_PYTHON_NORM if work.norm_in_python else _FUSED_NORM)[training]
    norms = bool(work.norm_elements) * (_PYTHON_NORM_KERNELS if work.norm_in_python else 1)
    act_bytes = _ACTIVATION[training] + (_GATE[training] if work.gated else 0)
    acts = bool(work.activation_elements) * (2 if work.gated else 1)
    memory = memory_us(gpu, work.norm_elements * norm_bytes, norms * _runs(training)) if norms else 0.0
    memory += memory_us(gpu, work.activation_elements * act_bytes, acts * _runs(training)) if acts else 0.0
    host = LINEAR_HOST_US * len(work.products) + EAGER_OP_US * (norms + acts)
    attention = 0.0
    if work.scores:
        attention = work.attention_flops * _runs(training) / (gpu.tflops["bf16"] * FRACTIONS[gpu.generation].gemm["bf16"]) / 1e6
        attention += memory_us(gpu, work.scores * _SCORES[training], _SCORE_KERNELS * _runs(training))
        host += EAGER_OP_US * (_SCORE_KERNELS + 2)
    elif work.attention_flops:
        attention = attention_us(gpu, work.attention_flops, False, training)
        host += LINEAR_HOST_US
    times = Times(_products_us(gpu, work.products, None, training), 0.0, attention, memory, host * _host_runs(training))
    return (times + _unchanged(gpu, work, training)) * work.calls


def te_times(gpu: Gpu, work: Work, recipe: str | None, training: bool) -> Times:
    """After conversion, in a recipe where the item takes it (else, or for None, in high precision)."""
    if not work.converted:
        return original_times(gpu, work, training)
    low = recipe if takes_recipe(work, recipe) else None
    act_bytes = (6, 16)[training] if work.gated else _ACTIVATION[training]
    memory = memory_us(gpu, work.norm_elements * _FUSED_NORM[training], _runs(training)) if work.norm_elements else 0.0
    if work.activation_elements:
        memory += memory_us(gpu, work.activation_elements * act_bytes, _runs(training))
    attention = attention_us(gpu, work.attention_flops, True, training) if work.attention_flops else 0.0
    modules = max(len(work.te_products), 1)
    host = (TE_RECIPE_HOST_US if low else TE_HOST_US) * modules
    times = Times(
        _products_us(gpu, work.te_products, low, training),
        _quantising_us(gpu, work, low, training) if low else 0.0,
        attention,
        memory,
        host * _host_runs(training),
    )
    return (times + _unchanged(gpu, work, training)) * work.calls


def _quantising_us(gpu: Gpu, work: Work, recipe: str, training: bool) -> float:
    """Input, weight and (in training) the output's gradient of each product, each once for all products that read it."""
    total = 0.0
    for index, product in enumerate(work.te_products):
        fused = (work.norm_fused and index == 0) or (work.activation_elements > 0 and index == len(work.te_products) - 1)
        total += quantise_us(gpu, product.rows * product.ins, recipe, training, fused)
        total += quantise_us(gpu, product.ins * product.outs, recipe, training)
        if training:
            total += quantise_us(gpu, product.rows * product.outs, recipe, training)
    return max(total, 0.0)


def _products_us(gpu: Gpu, products: Iterable[Product], recipe: str | None, training: bool) -> float:
    return sum(gemm_us(gpu, each, recipe) for product in products for each in product.passes[: 3 if training else 1])


def _unchanged(gpu: Gpu, work: Work, training: bool) -> Times:
    """Element-wise traffic and products that stay: backward takes twice the forward."""
    memory = memory_us(gpu, work.moved_bytes * _runs(training), work.kernels * _runs(training)) if work.kernels else 0.0
    peak = gpu.tflops["bf16"] * FRACTIONS[gpu.generation].gemm["bf16"]
    gemm = work.other_flops * _runs(training) / peak / 1e6 + LAUNCH_US * _runs(training) if work.other_flops else 0.0
    return Times(gemm, 0.0, 0.0, memory, EAGER_OP_US * work.kernels * _host_runs(training))


def _runs(training: bool) -> int:
    return 3 if training else 1


def _host_runs(training: bool) -> int:
    """Autograd issues the backward from C++: taken to cost the host as much as the forward (not measured)."""
    return 2 if training else 1


def can_run(gpu: Gpu, recipe: str) -> bool:
    """Whether the table has a peak for the recipe's products on this GPU."""
    return FORMATS[recipe].peak in gpu.tflops
