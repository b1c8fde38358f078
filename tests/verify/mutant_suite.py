"""The mutation suite: plant one mistake into a real conversion, let the gate judge, and judge apart whether it was one at all."""

from __future__ import annotations

import copy
import statistics
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import te_convert
from te_convert.capture.preserve import mode, seed_all
from te_convert.capture.scenario import Scenario, normalize_inputs
from te_convert.config import ConvertConfig
from te_convert.pipeline import observe
from te_convert.plan.choose import make_plan
from te_convert.plan.model import Plan
from te_convert.replacements.specs import DotProductAttentionSpec
from te_convert.rewrite.apply import Applied, apply_plan
from te_convert.verify.compare import row_ratios
from te_convert.verify.gate import verify_applied
from te_convert.verify.generation import can_generate, generate_outputs
from te_convert.verify.gradients import seeded_loss
from te_convert.verify.model import Parity
from te_convert.verify.padding import padding_mask
from te_convert.verify.precision import widened
from te_convert.verify.reference import Reference, record_reference
from te_convert.verify.run import Setting, run
from te_convert.verify.variants import other_values, padded_variants, shape_variants
from tests.integration import language_models
from tests.rewrite import block_samples
from tests.verify import model_zoo
from tests.verify.mutant_kinds import KINDS, Kind, Place

EXACT, ROUNDED, STEP = 1e-9, 2e-4, 1e-4
"""From which relative difference on a result is another one: in float64; in float32; of gradients, and after a step on them."""

STEP_LOW = 2e-2
"""The same of gradients of bf16 and fp16 parameters, which are rounded to their dtype, and of the parameters after a step."""

LOSS_OF_ACCURACY = 1.25
"""From which error against float64 over the original's own, as a median over batch rows, a bf16 or fp16 result is another one."""


def _zoo(name: str) -> tuple[nn.Module, Any]:
    model, inputs = model_zoo.build(name)
    return _moved(model), inputs


def _moved(model: nn.Module) -> nn.Module:
    """Norms and biases away from their defaults; matrices large enough that attention is not uniform."""
    model_zoo.perturb(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


def _language(name: str, **changes: Any) -> tuple[nn.Module, Any]:
    return language_models.build(name, **changes), {"input_ids": language_models.ids()}


def _encoder(**options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, **options), 2, enable_nested_tensor=False
    )
    padding = torch.zeros(2, 8, dtype=torch.bool)
    padding[0, 6:] = True
    return _moved(encoder.eval()), {"src": model_zoo.values(2, 8, 32), "src_key_padding_mask": padding}


def _decoder() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64, 0.0, batch_first=True), 2)
    causal = torch.ones(8, 8, dtype=torch.bool).triu(1)
    memory = model_zoo.values(2, 6, 32) * 0.7
    return _moved(decoder.eval()), {"tgt": model_zoo.values(2, 8, 32), "memory": memory, "tgt_mask": causal, "tgt_is_causal": True}


class _Blocks(nn.Module):
    """Embedding, hand-written pre-norm blocks, a norm without bias, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, block_samples.WIDTH)
        self.blocks = nn.ModuleList((block_samples.Block(), block_samples.Block(mlp=block_samples.MLP("silu", packed="second"))))
        self.norm = nn.LayerNorm(block_samples.WIDTH, bias=False)
        self.middle = nn.Linear(block_samples.WIDTH, block_samples.WIDTH)
        self.last = nn.LayerNorm(block_samples.WIDTH, bias=False)
        self.head = nn.Linear(block_samples.WIDTH, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.last(torch.tanh(self.middle(self.norm(x)))) + x)
        return y


def _blocks() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return _moved(_Blocks().eval()), (language_models.ids(2, 8) % 50,)


ARCHITECTURES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "llama": lambda: _language("llama", tie_word_embeddings=True),
    "mistral": lambda: _language("mistral"),
    "gpt2": lambda: _language("gpt2"),
    "qwen3": lambda: _language("qwen3"),
    "gemma2": lambda: _language("gemma2"),
    "mixtral": lambda: _language("mixtral"),
    "phi3": lambda: _language("phi3"),
    "gpt_neox": lambda: _language("gpt_neox"),
    "cohere": lambda: _language("cohere"),
    "bert": lambda: _zoo("bert"),
    "t5": lambda: _zoo("t5"),
    "bart": lambda: _zoo("bart"),
    "whisper": lambda: _zoo("whisper"),
    "vit": lambda: _zoo("vit"),
    "torch encoder": _encoder,
    "torch encoder, pre-norm": lambda: _encoder(norm_first=True),
    "torch decoder": _decoder,
    "hand-written blocks": _blocks,
}


@dataclass
class Subject:
    """An architecture with its plan, what the gate knows of the original, and fresh inputs with the original's results.

    Attributes:
        truth: results of the original by aspect; computed when asked for.
    """

    name: str
    model: nn.Module
    plan: Plan
    reference: Reference
    fresh: list[Scenario]
    dtype: torch.dtype = torch.float32
    truth: dict[str, Any] = field(default_factory=dict)

    def convert(self) -> Applied:
        return apply_plan(copy.deepcopy(self.model), self.plan, "reference")


def prepare(name: str, dtype: torch.dtype = torch.float32) -> Subject:
    model, inputs = ARCHITECTURES[name]()
    model, inputs = model.to(dtype), model_zoo.cast(inputs, dtype)
    scenarios, captured, notes = observe(model, normalize_inputs(inputs), ConvertConfig())
    plan = make_plan(model, captured, ConvertConfig(), notes)
    padded = any(isinstance(fusion.spec, DotProductAttentionSpec) for fusion in plan.fusions)
    reference = record_reference(model, scenarios, hide_padding=padded)
    first = scenarios[0]
    fresh = [other_values(replace(first, training=False), seed) for seed in (11, 12)]
    fresh += [*shape_variants(fresh[0]), *padded_variants(model, fresh[0])]
    return Subject(name, model, plan, reference, [scenario for scenario in fresh if _runs(model, scenario)], dtype)


def _runs(model: nn.Module, scenario: Scenario) -> bool:
    try:
        run(model, scenario, Setting())
    except Exception:  # a length that the model does not take
        return False
    return True


# ---- did the mistake change anything? --------------------------------------------------------------------------------------
def changes(subject: Subject, make: Callable[[], nn.Module]) -> str:
    """What a mutant computes differently from the original, or "" where it is equivalent.

    Args:
        subject: the original.
        make: builds the mutant anew.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for aspect, (look, bound) in ASPECTS.items():
            if aspect not in subject.truth:
                subject.truth[aspect] = look(subject, _plain_experts(copy.deepcopy(subject.model)))
            if subject.truth[aspect] is None:
                continue
            try:
                found = look(subject, _plain_experts(make()))
            except Exception:  # a mutant may fail in any way
                return aspect
            if _differs(subject, aspect, found, bound):
                return aspect
    return ""


def _differs(subject: Subject, aspect: str, found: Results, bound: float) -> bool:
    truth = subject.truth[aspect]
    if subject.dtype is torch.float32 or aspect not in ("rounding", "gradients", "a step"):
        return difference(truth, found) > bound
    if aspect != "rounding":
        return difference(truth, found) > STEP_LOW
    if difference(truth, found) == float("inf"):
        return True
    if "draws" not in subject.truth:
        original = _plain_experts(copy.deepcopy(subject.model))
        subject.truth["draws"] = _outputs(subject, original, True, scenarios=_draws(subject))
    exact = subject.truth["draws"]
    ratios = []
    for index in range(len(_draws(subject))):
        names = [name for name in exact if name.startswith(f"{index} ")]
        wanted, own, other = ([(name, side[name]) for name in names] for side in (exact, truth, found))
        ratios += row_ratios(wanted, own, other, subject.dtype)
    return bool(ratios) and statistics.median(ratios) > LOSS_OF_ACCURACY


def _plain_experts(model: nn.Module) -> nn.Module:
    """Transformers' grouped product for experts does not know float64."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation_internal = "eager"
    return model


Results = dict[str, Tensor]


def difference(wanted: Results, found: Results) -> float:
    """The largest difference relative to its tensor, with a floor for those that are zero in theory; infinite for other shapes."""
    if wanted.keys() != found.keys():
        return float("inf")
    floor = 1e-3 * max((_size(t) for t in wanted.values()), default=0.0)
    worst = 0.0
    for name, tensor in wanted.items():
        other = found[name]
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            return float("inf")
        if not torch.equal(torch.isfinite(tensor), torch.isfinite(other)):
            return float("inf")
        gap = _size((tensor.double() - other.double()).nan_to_num())
        worst = max(worst, gap / max(_size(tensor), floor, 1e-30))
    return worst


def _size(tensor: Tensor) -> float:
    return float(tensor.double().nan_to_num(posinf=0.0, neginf=0.0).abs().max()) if tensor.numel() else 0.0


def _setting(subject: Subject, wide: bool) -> Setting:
    return Setting(widen=torch.float64 if wide else None, hide_padding=subject.reference.hide_padding)


def _draws(subject: Subject) -> list[Scenario]:
    """Enough inputs that a median over their rows tells a loss of accuracy from noise."""
    return [other_values(subject.fresh[0], seed) for seed in range(20, 44)]


def _rounded(subject: Subject, model: nn.Module) -> Results:
    """In the model's own precision."""
    return _outputs(subject, model, False, scenarios=None if subject.dtype is torch.float32 else _draws(subject))


def _outputs(
    subject: Subject,
    model: nn.Module,
    wide: bool,
    training: bool = False,
    others: bool = True,
    scenarios: list[Scenario] | None = None,
) -> Results:
    """Of all fresh inputs, of the first alone, or of others."""
    found: Results = {}
    for index, scenario in enumerate(scenarios or (subject.fresh if others else subject.fresh[:1])):
        for path, tensor in run(model, replace(scenario, training=training), _setting(subject, wide)):
            if tensor.is_floating_point():
                found[f"{index} {path}"] = tensor
    return found


def _generated(subject: Subject, model: nn.Module) -> Results | None:
    scenario = subject.fresh[0]
    if not can_generate(subject.model, scenario):
        return None
    return {f"{i} {path}": t for i, (path, t) in enumerate(generate_outputs(model, scenario, _setting(subject, True)))}


def _backward(subject: Subject, model: nn.Module) -> None:
    """Gradients of a seeded loss, computed in float64."""
    scenario = subject.fresh[0]
    args, kwargs = copy.deepcopy((scenario.args, scenario.kwargs))
    with mode(model, training=False), widened(model, torch.float64):
        seed_all(0)
        output, padded = model(*args, **kwargs), padding_mask(model, scenario) if subject.reference.hide_padding else None
        seeded_loss(output, padded).backward()


def _gradients(subject: Subject, model: nn.Module) -> Results:
    """Of the parameters, by their names in the original, to which a mutant is put back for it."""
    _backward(subject, model)
    original = te_convert.revert(model)
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in original.named_parameters(remove_duplicate=False)}


def _after_a_step(subject: Subject, model: nn.Module) -> Results:
    """Outputs and weights after one step on the gradients."""
    _backward(subject, model)
    found = [(parameter, parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    largest = max(float(gradient.abs().max()) for _, gradient in found)
    with torch.no_grad():
        for parameter, gradient in found:
            parameter.sub_(gradient, alpha=0.1 / largest)
    return _outputs(subject, model, True) | {f"state {name}": tensor for name, tensor in _weights(subject, model).items()}


def _weights(subject: Subject, model: nn.Module) -> Results:
    return {name: t.detach().clone() for name, t in te_convert.original_state_dict(model).items() if t.is_floating_point()}


ASPECTS: dict[str, tuple[Callable[[Subject, nn.Module], Any], float]] = {
    "outputs": (lambda s, m: _outputs(s, m, True, others=False), EXACT),
    "other inputs": (lambda s, m: _outputs(s, m, True), EXACT),
    "rounding": (_rounded, ROUNDED),
    "train mode": (lambda s, m: _outputs(s, m, True, training=True, others=False), EXACT),
    "decoding": (_generated, EXACT),
    "state dict": (_weights, 0.0),
    "gradients": (_gradients, STEP),
    "a step": (_after_a_step, STEP),
}


# ---- one mutant ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Outcome:
    """One mutant.

    Attributes:
        fqn: the site with the mistake.
        module: its TE module.
        change: what it changes, "" when it is equivalent.
        caught: the gate failed it or put the site back.
        why: what the gate said.
    """

    kind: str
    architecture: str
    fqn: str
    module: str
    change: str
    caught: bool
    why: str
    collateral: int = 0
    dtype: str = "float32"


def module_names(applied: Applied) -> list[str]:
    """TE modules of a conversion, each once."""
    return sorted({type(site).__name__.removeprefix("Reference") for site in applied.sites.values()})


def plant(kind: Kind, applied: Applied, module: str, start: int) -> Place | None:
    """The mistake in one site of a TE module, counted from ``start``; None where no site takes it."""
    names = [fqn for fqn, site in applied.sites.items() if type(site).__name__.removeprefix("Reference") == module]
    for fqn in (*names[start % len(names) :], *names[: start % len(names)]):
        place = Place(applied, fqn)
        if kind.plant(place):
            return place
    return None


def try_mutant(subject: Subject, kind: Kind, module: str) -> Outcome | None:
    """Plant, judge, verify; None where no site takes the mistake."""
    start = zlib.crc32(f"{kind.name} {subject.name}".encode())
    applied = subject.convert()
    place = plant(kind, applied, module, start)
    if place is None:
        return None

    def again() -> nn.Module:
        other = subject.convert()
        assert plant(kind, other, module, start) is not None
        return other.model

    change = changes(subject, again)
    parity = gate(applied, subject.reference)
    reverted = {site.fqn: site.why for site in parity.reverted}
    found = [fqn for fqn in place.touched if fqn in reverted]
    why = reverted[found[0]] if found else "" if parity.passed else parity.status
    others, dtype = len(reverted.keys() - set(place.touched)), str(subject.dtype).removeprefix("torch.")
    return Outcome(kind.name, subject.name, place.fqn, module, change, bool(found) or not parity.passed, why, others, dtype)


def gate(applied: Applied, reference: Reference) -> Parity:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return verify_applied(applied, reference)


def outcomes(subject: Subject, names: list[str], everywhere: bool = False) -> Iterator[Outcome]:
    """Every kind in one TE module of the architecture that takes it, chosen by name, or in each."""
    modules = module_names(subject.convert())
    for name in names:
        start = zlib.crc32(f"{subject.name} {name}".encode()) % len(modules)
        for module in (*modules[start:], *modules[:start]):
            outcome = try_mutant(subject, KINDS[name], module)
            if outcome is not None:
                yield outcome
                if not everywhere:
                    break


def false_alarms(subject: Subject) -> list[str]:
    """What the gate says against the right conversion, and what :func:`changes` says."""
    parity = gate(subject.convert(), subject.reference)
    problems = [f"{site.fqn}: {site.why}" for site in parity.reverted]
    if not parity.passed:
        problems.append(parity.status)
    change = changes(subject, lambda: subject.convert().model)
    return problems + ([f"the judge: {change}"] if change else [])
