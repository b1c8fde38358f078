"""Hand-made reports and plans that the renderers' tests share."""

from __future__ import annotations

import math
from dataclasses import replace

from te_convert.plan.model import CallShape, Decision, Outcome, Plan
from te_convert.reasons import Reason, ReasonCode, reason
from te_convert.replacements.specs import LayerNormSpec, LinearSpec, Spec
from te_convert.report.model import Report, build_sites, measure_coverage
from te_convert.verify.model import Figures, Parity, RevertedSite, ScenarioParity, SiteParity

EQUAL = Figures(math.inf, 0.0, True, 4096)
CLOSE = Figures(138.27, 1.19e-7, False, 4096)
FAR = Figures(11.94, 0.31, False, 4096)
BOUND = "SQNR ≥ 90 dB"
HOSTILE = "a|b.<script>alert(1)</script>.[bold red]x[/].`tick`.*star*.&amp;.\x1b[31mred\n_u_"
ENVIRONMENT = {"torch": "2.0", "cuda": None, "transformer_engine": None, "threads": 1}
TWINS = "Transformer Engine is not installed"
LAYER = ("attention.self.query", "attention.self.key", "attention.self.value", "output.dense")


def linear(fqn: str, outcome: Outcome = Outcome.CONVERTED, *reasons: Reason, **changes: object) -> Decision:
    decision = Decision(
        fqn=fqn,
        kind="Linear",
        class_name="Linear",
        outcome=outcome,
        rule="linear",
        spec=LinearSpec(384, 384, True, "float32"),
        reasons=reasons,
        calls=2,
        shapes=(CallShape((2, 128, 384), (2, 128, 384), "float32"),),
        params=147_840,
        flops=75_497_472,
    )
    return replace(decision, **changes)  # type: ignore[arg-type]


def norm(fqn: str, outcome: Outcome = Outcome.CONVERTED, *reasons: Reason, spec: Spec | None = None) -> Decision:
    return linear(
        fqn,
        outcome,
        *reasons,
        kind="LayerNorm",
        class_name="LayerNorm",
        rule="layernorm",
        spec=spec or LayerNormSpec(384, 1e-12, False, "float32"),
        params=768,
        flops=0,
    )


def other(fqn: str, class_name: str) -> Decision:
    return Decision(fqn=fqn, kind=class_name, class_name=class_name, outcome=Outcome.NO_MATCH, calls=1)


def plan_of(*decisions: Decision, recipe: str | None = None, notes: tuple[str, ...] = ()) -> Plan:
    return Plan("BertModel", decisions, ("inputs", "inputs[train]"), recipe, 22_713_216, 5_637_144_576, notes)


def report_of(plan: Plan, parity: Parity, **changes: object) -> Report:
    report = Report(
        model_class=plan.model_class,
        converted=bool(plan.converting),
        sites=build_sites(plan, parity),
        parity=parity,
        coverage=measure_coverage(plan),
        recipe=plan.recipe,
        backend=parity.backend,
        backend_reason=TWINS,
        scenarios=plan.scenarios,
        environment=ENVIRONMENT,
    )
    return replace(report, **changes)  # type: ignore[arg-type]


def site_parity(fqn: str, figures: Figures = EQUAL, passed: bool = True) -> SiteParity:
    return SiteParity(fqn, "float32", figures, 2, BOUND, passed)


def bert_plan(recipe: str | None = None) -> Plan:
    layers = [f"encoder.layer.{index}." for index in range(6)]
    return plan_of(
        other("embeddings.word_embeddings", "Embedding"),
        *(linear(layer + name) for layer in layers for name in LAYER),
        *(norm(layer + "output.LayerNorm") for layer in layers),
        *(other(layer + "output.dropout", "Dropout") for layer in layers),
        recipe=recipe,
    )


def success() -> Report:
    plan = bert_plan()
    fqns = [decision.fqn for decision in plan.converting]
    parity = Parity(
        status="passed",
        backend="reference",
        scenarios=(
            ScenarioParity("inputs", "float32", True, CLOSE, None, BOUND, True, "last_hidden_state"),
            ScenarioParity("inputs", "bfloat16", False, replace(CLOSE, sqnr_db=49.99), 1.0114, "error ratio ≤ 1.25", True),
        ),
        sites=tuple(site_parity(fqn, CLOSE if fqn.endswith("LayerNorm") else EQUAL) for fqn in fqns),
        executed=dict.fromkeys(fqns, 3),
    )
    not_verified = ("Transformer Engine's own kernels: this machine cannot run them.", "Training beyond one backward pass.")
    return report_of(plan, parity, not_verified=not_verified)


def refusals() -> Report:
    tied = reason(ReasonCode.PARAMETER_TIED_LAYOUT, "lm_head.weight is wte.weight")
    plan = plan_of(
        linear(
            "blocks.0.fc",
            Outcome.CONVERTED,
            reason(ReasonCode.ALIGNMENT_FEATURES, "50 is not a multiple of 32"),
            precision="high",
        ),
        *(norm(f"blocks.{i}.norm", Outcome.REFUSED, reason(ReasonCode.NORM_NO_AFFINE, "weight is None")) for i in (0, 1, 2, 5)),
        linear("lm_head", Outcome.REFUSED, tied, reason(ReasonCode.DTYPE_FLOAT64, "float64")),
        *(linear(f"experts.{i}.w", Outcome.REFUSED, reason(ReasonCode.MODULE_NEVER_CALLED, f"expert {i}")) for i in range(10)),
        linear("head", Outcome.EXCLUDED, reason(ReasonCode.USER_EXCLUDED, "pattern 'head'")),
        linear("odd", Outcome.REFUSED),
        linear("new", Outcome.REFUSED, Reason("plugin.cause", "from a rule of another package", "ask its authors")),
        other("act", "GELU"),
        recipe="fp8",
        notes=("torch.compile hides what runs inside `core`.",),
    )
    parity = Parity("passed", "te", "cuda", sites=(site_parity("blocks.0.fc"),), executed={"blocks.0.fc": 4}, notes=("1 run.",))
    return report_of(plan, parity, warnings=("The head was excluded.",), backend_reason="asked for", timings_s={"capture": 0.42})


def nothing() -> Report:
    plan = plan_of(other("conv", "Conv2d"), other("bn", "BatchNorm2d"), other("conv2", "Conv2d"))
    return report_of(replace(plan, flops_total=0), Parity("not-verified", "reference"))


def parity_failed() -> Report:
    plan = plan_of(
        *(linear(f"layers.{i}.up") for i in range(2)),
        norm("norm", Outcome.REFUSED, reason(ReasonCode.PARITY_FAILED, "SQNR 11.9 dB, bound 90 dB")),
        linear("idle"),
    )
    parity = Parity(
        status="failed",
        backend="reference",
        scenarios=(ScenarioParity("inputs[padded]", "float32", True, FAR, None, BOUND, False),),
        sites=(site_parity("layers.0.up"), site_parity("layers.1.up", replace(FAR, sqnr_db=math.nan), False)),
        reverted=(RevertedSite("norm", "below the bound", FAR), RevertedSite("gone", "raised ValueError", None)),
        executed={"layers.0.up": 1, "layers.1.up": 1},
    )
    return report_of(plan, parity)


def hostile() -> Report:
    detail = "see [link](http://x) | <b>&lt;</b> [/bold] :smile: $a$ @someone"
    plan = plan_of(
        linear(HOSTILE),
        linear("- # 1. " + HOSTILE, Outcome.REFUSED, Reason("user.excluded", detail, "# <hint> | [red]")),
        other("x", "Weird<Class>|[T]"),
    )
    parity = Parity(
        "passed",
        "reference",
        scenarios=(ScenarioParity("in[0]|<i>", "float32", True, CLOSE, None, BOUND, True),),
        sites=(site_parity(HOSTILE, CLOSE),),
        executed={HOSTILE: 1},
    )
    noisy = ("# [bold]warning[/bold] <img src=x onerror=alert(1)> | pipe", "1. {{ 7 * 7 }} {% raw %} \\| back\\slash")
    return report_of(plan, parity, warnings=noisy, notes=noisy, model_class="Net[<T>|x]")


SAMPLES = {
    "success": success,
    "refusals": refusals,
    "nothing": nothing,
    "parity_failed": parity_failed,
    "hostile": hostile,
}
