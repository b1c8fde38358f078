"""What `te-convert estimate` predicts against what others published: one row per measurement, with the error.

    python benchmarks/estimate.py               # every row, under a minute on one core; needs no GPU
    python benchmarks/estimate.py --markdown    # the tables of docs/estimate.md

A row is a speed-up.  "fit" rows set the constants of src/te_convert/estimate; no constant was changed after looking at the
others.  A prediction has the wrong sign when it is on the other side of 1 than a measurement that is more than 5 % away from 1.
Rows that lack the shapes, or compare something else, are listed with the reason.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_convert.capture.scenario import normalize_inputs
from te_convert.config import ConvertConfig
from te_convert.estimate.gpus import Gpu, find_gpu
from te_convert.estimate.kernels import Product, gemm_us, quantise_us
from te_convert.estimate.model import Estimate
from te_convert.estimate.predict import predict
from te_convert.estimate.run import find_all_work
from te_convert.estimate.work import Work
from te_convert.pipeline import observe
from te_convert.plan.choose import make_plan

NEAR_ONE = 0.05


@dataclass(frozen=True)
class Row:
    """One published speed-up.

    Attributes:
        source: where it was published.
        what: the setting.
        published: the measured speed-up.
        predict: ours.
        use: "fit", "held out", or "sign" (held out, but only the side of 1 is comparable).
        shape: a single product of a table, not a layer or a step.
    """

    source: str
    what: str
    published: float
    predict: Callable[[], float]
    use: str = "held out"
    shape: bool = False

    @property
    def predicted(self) -> float:
        return self.predict()

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1

    @property
    def right_sign(self) -> bool:
        return abs(self.published - 1) <= NEAR_ONE or (self.published - 1) * (self.predicted - 1) > 0


# ---- TE's gemm_profiling page: h 4096, ffn 16384, 31 x 512 tokens; te.Linear's forward on each of the twelve products -----------
TOKENS_5B = 31 * 512
LAYER_5B = {
    "QKV": Product(TOKENS_5B, 4096, 12288),
    "attention output": Product(TOKENS_5B, 4096, 4096),
    "MLP up": Product(TOKENS_5B, 4096, 16384),
    "MLP down": Product(TOKENS_5B, 16384, 4096),
}


def profiled(gpu: str, recipe: str, ops: tuple[str, ...] = tuple(LAYER_5B), quantised: bool = False, passes: int = 3) -> float:
    """bf16 time over the recipe's; each product quantises both of its operands itself, as the page's program does."""
    there = find_gpu(gpu)
    products = [product for op in ops for product in LAYER_5B[op].passes[:passes]]
    low = sum(gemm_us(there, product, recipe) for product in products)
    if not quantised:
        low += sum(_both_operands(there, product, recipe) for product in products)
    return sum(gemm_us(there, product) for product in products) / low


def _both_operands(gpu: Gpu, product: Product, recipe: str) -> float:
    return quantise_us(gpu, product.rows * product.ins, recipe, True) + quantise_us(gpu, product.ins * product.outs, recipe, True)


PROFILING = "TE gemm_profiling"
_B300_MS = {  # forward of each product: bf16, current, delayed, MXFP8, NVFP4
    "QKV": (1.071, 0.605, 0.503, 0.579, 0.392),
    "attention output": (0.307, 0.317, 0.231, 0.269, 0.256),
    "MLP up": (1.393, 0.924, 0.850, 0.924, 0.635),
    "MLP down": (1.426, 1.033, 0.901, 1.076, 0.649),
}
_B300_RECIPES = ("fp8-current", "fp8-delayed", "mxfp8", "nvfp4")
ROWS_PROFILING = [
    Row(
        PROFILING,
        "H200 NVL, products alone, current",
        31.968 / 16.785,
        lambda: profiled("h200-nvl", "fp8-current", quantised=True),
        "fit",
    ),
    Row(PROFILING, "B300, products alone, current", 13.102 / 6.812, lambda: profiled("b300", "fp8-current", quantised=True), "fit"),
    Row(PROFILING, "B300, products alone, MXFP8", 13.102 / 7.161, lambda: profiled("b300", "mxfp8", quantised=True), "fit"),
    Row(PROFILING, "B300, products alone, NVFP4", 13.102 / 3.764, lambda: profiled("b300", "nvfp4", quantised=True), "fit"),
    Row(PROFILING, "H200 NVL, block", 32.014 / 22.882, lambda: profiled("h200-nvl", "fp8-block"), "fit"),
    Row(PROFILING, "B300, MXFP8", 12.758 / 8.984, lambda: profiled("b300", "mxfp8"), "fit"),
    Row(PROFILING, "B300, NVFP4", 12.758 / 6.453, lambda: profiled("b300", "nvfp4"), "fit"),
    Row(PROFILING, "H200 NVL, delayed", 32.014 / 18.978, lambda: profiled("h200-nvl", "fp8-delayed")),
    Row(PROFILING, "H200 NVL, current", 32.014 / 20.285, lambda: profiled("h200-nvl", "fp8-current")),
    Row(PROFILING, "B300, delayed", 12.758 / 7.802, lambda: profiled("b300", "fp8-delayed")),
    Row(PROFILING, "B300, current", 12.758 / 9.147, lambda: profiled("b300", "fp8-current")),
    *(
        Row(
            PROFILING,
            f"B300, {op} forward, {recipe}",
            times[0] / times[1 + index],
            lambda op=op, recipe=recipe: profiled("b300", recipe, (op,), passes=1),  # type: ignore[misc]
            shape=True,
        )
        for op, times in _B300_MS.items()
        for index, recipe in enumerate(_B300_RECIPES)
    ),
]


# ---- whole models through the planner -------------------------------------------------------------------------------------------
def works_of(make: Callable[[], tuple[nn.Module, Any]], **options: Any) -> tuple[Work, ...]:
    """The work items that `te-convert estimate` would find, for a model and inputs that are made on the meta device."""
    with torch.device("meta"):
        model, inputs = make()
    config = ConvertConfig(**options)
    _, captured, notes = observe(model, normalize_inputs(inputs), config)
    return find_all_work(make_plan(model, captured, config, notes), model, captured)


def repeated(works: tuple[Work, ...], layers: int) -> tuple[Work, ...]:
    """The same with layer 0 so many times: planning one layer is enough."""
    return tuple(work.repeated(layers) if "layers.0" in work.fqn else work for work in works)


def with_adamw(works: tuple[Work, ...], parameters: float, bytes_each: float = 2.0) -> tuple[Work, ...]:
    """And torch's fused AdamW, which reads weight, gradient and two moments and writes three of them.

    It runs once a step, and the traffic of work items counts three times in training.
    """
    return (*works, Work("(AdamW)", "elementwise", "other", False, moved_bytes=7 * bytes_each * parameters / 3, kernels=1))


class Repeated(nn.Module):
    """The same Linear ten times in a row: the program of NVIDIA/TransformerEngine#445."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(10):
            x = self.linear(x)
        return x


class EagerLayer(nn.Module):
    """A pre-norm layer with attention in single operations, as in TE's "getting started" page."""

    def __init__(self, hidden: int = 4096, heads: int = 32) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.fc1, self.fc2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(batch, length, self.heads, -1).transpose(1, 2).chunk(3, dim=-1)
        scores = (q @ k.transpose(-2, -1)) * (q.shape[-1] ** -0.5)
        y = (self.dropout(scores.softmax(dim=-1)) @ v).transpose(1, 2).reshape(batch, length, hidden)
        x = x + self.dropout(self.proj(y))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x)), approximate="tanh"))  # type: ignore[no-any-return]


@cache
def linear_chain(rows: int, size: int) -> Estimate:
    works = works_of(lambda: (Repeated(size).bfloat16(), torch.zeros(rows, size, dtype=torch.bfloat16)))
    return predict(works, find_gpu("h100"), mode="inference")


SHORT, LONG = 256, 2048
"""Planning understands written-out attention by running it, so it gets short sequences; the scores grow with their length."""


def eager_layer(**options: Any) -> tuple[Work, ...]:
    """8 sequences of 2048 tokens."""
    works = works_of(lambda: (EagerLayer().bfloat16(), torch.zeros(1, SHORT, 4096, dtype=torch.bfloat16)), **options)
    longer = LONG / SHORT
    works = tuple(work.scaled(8 * longer) for work in works)
    return tuple(replace(work, scores=work.scores * longer, attention_flops=work.attention_flops * longer) for work in works)


@cache
def getting_started() -> Estimate:
    return predict(eager_layer(), find_gpu("h100"))


@cache
def getting_started_swapped() -> float:
    """Single modules on TE in bf16, attention as it was."""
    works = eager_layer()
    kept = tuple(replace(work, converted=False) if work.share == "attention" else work for work in works)
    return predict(kept, find_gpu("h100"), "bf16").recipe("bf16").speedup


@cache
def llama(inner: int, groups: int, vocabulary: int, batch: int = 8, length: int = 256) -> tuple[Work, ...]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=1,
        hidden_size=4096,
        intermediate_size=inner,
        num_attention_heads=32,
        num_key_value_heads=groups,
        vocab_size=vocabulary,
        use_cache=False,
    )
    inputs = {"input_ids": torch.zeros(batch, length, dtype=torch.int64, device="meta")}
    return repeated(works_of(lambda: (LlamaForCausalLM(config).bfloat16(), inputs)), 32)


@cache
def te_llama(inner: int, groups: int, vocabulary: int, parameters: float, recipe: str) -> float:
    """The tutorial replaces decoder layers; under FP8 accelerate swaps the language model's head as well."""
    works = llama(inner, groups, vocabulary)
    if recipe == "bf16":
        works = tuple(replace(work, converted=work.converted and "layers" in work.fqn) for work in works)
    return predict(with_adamw(works, parameters), find_gpu("h100"), recipe).recipe(recipe).speedup


class GptBlock(nn.Module):
    """A block of GPT-2's form over torch's fused attention."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.fc1, self.fc2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.ln1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, hidden)
        x = x + self.proj(y)
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x)), approximate="tanh"))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """GPT-2 XL with one of its 48 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50304, 1600), nn.Linear(1600, 50304, bias=False)
        self.layers, self.norm = nn.ModuleList([GptBlock(1600, 25)]), nn.LayerNorm(1600)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def over_compiled(works: tuple[Work, ...], recipe: str, parameters: float) -> float:
    """The recipe over a compiled original: inductor's fusions are taken to be as good as TE's in bf16, and the GPU the limit."""
    found = predict(with_adamw(works, parameters), find_gpu("h100"), recipe)
    return found.recipe("bf16").times.gpu_us / found.recipe(recipe).times.step_us


@cache
def gpt_xl(batch: int) -> float:
    works = repeated(works_of(lambda: (Gpt().bfloat16(), torch.zeros(batch, 1024, dtype=torch.int64))), 48)
    return over_compiled(works, "fp8-delayed", 1.56e9)


@cache
def torchao_llama() -> float:
    """torchtitan leaves the language model's head in bf16; FSDP2 over eight GPUs splits the optimizer."""
    works = llama(14336, 8, 128256, 1, 8192)
    works = tuple(replace(work, high=work.high or work.fqn == "lm_head") for work in works)
    return over_compiled(works, "fp8-current", 8.03e9 / 8)


@cache
def toy() -> float:
    """The program of torchao's README of that time, as far as we remember its shapes."""

    def make() -> tuple[nn.Module, Tensor]:
        model = nn.Sequential(nn.Linear(2048, 4096), nn.Linear(4096, 128)).bfloat16()
        return model, torch.zeros(4096, 2048, dtype=torch.bfloat16)

    return predict(works_of(make), find_gpu("h100"), "fp8-current").recipe("fp8-current").speedup


def chain(rows: int, size: int, recipe: str) -> Callable[[], float]:
    return lambda: linear_chain(rows, size).recipe(recipe).speedup


LLAMA_2, LLAMA_3 = (11008, 32, 32000, 6.74e9), (14336, 8, 128256, 8.03e9)
ISSUE_445, USER_445 = "TE#445", "TE#445, another user"
STARTED = "TE getting started"
ROWS_MODELS = [
    Row(ISSUE_445, "10 x Linear 1024, 1024 rows, bf16 on TE", 0.175725 / 0.573835, chain(1024, 1024, "bf16"), "fit"),
    Row(ISSUE_445, "10 x Linear 1024, 1024 rows, delayed", 0.175725 / 2.072206, chain(1024, 1024, "fp8-delayed"), "fit"),
    Row(USER_445, "10 x Linear 1024, 1024 rows, bf16 on TE", 0.277533 / 0.890634, chain(1024, 1024, "bf16")),
    Row(USER_445, "10 x Linear 1024, 1024 rows, delayed", 0.277533 / 2.573252, chain(1024, 1024, "fp8-delayed")),
    Row(USER_445, "10 x Linear 1024, 10240 rows, bf16 on TE", 1.049643 / 1.003493, chain(10240, 1024, "bf16")),
    Row(USER_445, "10 x Linear 1024, 10240 rows, delayed", 1.049643 / 2.654590, chain(10240, 1024, "fp8-delayed")),
    Row(USER_445, "10 x Linear 5120, 10240 rows, bf16 on TE", 25.783981 / 25.966423, chain(10240, 5120, "bf16")),
    Row(USER_445, "10 x Linear 5120, 10240 rows, delayed", 25.783981 / 9.602304, chain(10240, 5120, "fp8-delayed")),
    Row(STARTED, "H100, layer 4096, single modules, bf16 on TE", 48.280 / 49.342, getting_started_swapped),
    Row(STARTED, "H100, layer 4096, with attention, bf16 on TE", 48.280 / 35.709, lambda: getting_started().recipe("bf16").speedup),
    Row(STARTED, "H100, layer 4096, fused, delayed", 48.280 / 22.964, lambda: getting_started().recipe("fp8-delayed").speedup),
    Row("TE te_llama", "H100, Llama-2 7B, bf16 on TE", 248 / 185, lambda: te_llama(*LLAMA_2, "bf16")),
    Row("TE te_llama", "H100, Llama-2 7B, delayed", 248 / 160, lambda: te_llama(*LLAMA_2, "fp8-delayed")),
    Row("TE te_llama", "H100, Llama-3 8B, bf16 on TE", 270 / 217, lambda: te_llama(*LLAMA_3, "bf16")),
    Row("TE te_llama", "H100, Llama-3 8B, delayed", 270 / 185, lambda: te_llama(*LLAMA_3, "fp8-delayed")),
    Row("ao#1297", "H100, GPT-2 XL, batch 12, delayed over compiled bf16", 501.2 / 493.17, lambda: gpt_xl(12)),
    Row("ROCm/TE#72", "H100, GPT-2 XL, batch 14, delayed over compiled bf16", 490 / 478.73, lambda: gpt_xl(14)),
    Row("torchao", "8 x H100, Llama-3 8B, tensorwise over compiled bf16", 7689.5 / 6150, torchao_llama),
    Row("ao#2262", "H100, two Linears, 4096 rows, current, eager", 0.1303 / 0.1844, toy, "sign"),
]
ROWS = [*ROWS_PROFILING, *ROWS_MODELS]

NOT_MODELLED = {
    "TE te_gemma": "generation with a static cache and CUDA graphs; neither is modelled",
    "TE te_mixtral": "several GPUs with expert parallelism, and sequences whose lengths are not given; the baseline is a pipeline "
    "without overlap",
    "BioNeMo ESM-2 15B": "most of it is sequence packing, and the lengths are not given",
    "torchao rowwise": "not a recipe of TE",
    "torchao 70B and 405B, 512 GPUs": "communication decides; batch and parallelism are not given",
    "Megatron-LM#396": "13B on H100: neither micro-batch nor parallelism is given",
    "ROCm/TE#72, 1.33x": "the author corrected it: 638 TFLOPS were an H200 at batch 38; the H100's 490 are the row above",
    "TE#1119": "a whole TE layer against an attention alone",
    "Liger-Kernel": "not TE",
    "accelerate": "no figures",
}


def medians(rows: list[Row]) -> dict[str, float]:
    """Median of the absolute errors by group."""
    held = [row for row in rows if row.use == "held out"]
    groups = {
        "held out": held,
        "held out, layers and steps": [row for row in held if not row.shape],
        "held out, single products": [row for row in held if row.shape],
        "fit": [row for row in rows if row.use == "fit"],
    }
    return {name: statistics.median(abs(row.error) for row in group) for name, group in groups.items() if group}


def table(rows: list[Row], markdown: bool) -> str:
    lines = ["| Source | Setting | Published | Predicted | Error | Use |", "| --- | --- | ---: | ---: | ---: | --- |"]
    for row in rows:
        error = "" if row.use == "sign" else f"{100 * row.error:+.0f} %"
        sign = "" if row.right_sign else ", wrong sign"
        lines.append(f"| {row.source} | {row.what} | {row.published:.2f} | {row.predicted:.2f} | {error} | {row.use}{sign} |")
    return "\n".join(lines if markdown else [line.strip("| ").replace(" | ", "  ") for line in lines if "---" not in line])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", action="store_true")
    markdown = parser.parse_args().markdown
    print(table(ROWS, markdown))
    print()
    for name, value in medians(ROWS).items():
        print(f"Median error, {name}: {100 * value:.1f} %")
    wrong = [row.what for row in ROWS if not row.right_sign]
    print(f"Rows with the wrong sign: {len(wrong)} of {len(ROWS)}{': ' + '; '.join(wrong) if wrong else ''}")
    print()
    for name, why in NOT_MODELLED.items():
        print(f"- {name}: {why}." if markdown else f"not modelled: {name}: {why}")


if __name__ == "__main__":
    main()
