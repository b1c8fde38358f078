from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import nn

import te_convert
from te_convert.errors import InputError
from te_convert.explain.model import Explanation
from te_convert.plan.trace import Attempt
from tests.explain.explain_samples import sample

MODEL, INPUTS = sample()


def explain(fqn: str, **options: Any) -> Explanation:
    return te_convert.explain(MODEL, fqn, INPUTS, **options)


def said(found: Explanation, rule: str, about: str | None = None) -> Attempt:
    (attempt,) = (a for a in found.attempts if a.rule == rule and (about is None or a.about[0] == about))
    return attempt


def codes(attempt: Attempt) -> list[str]:
    return [why.code for why in attempt.reasons]


def test_the_decision_is_that_of_the_plan() -> None:
    plan = te_convert.analyze(MODEL, INPUTS)
    for name in ("0", "1.norm1", "1.attention.q", "2.attention", "3"):
        assert explain(name).decision == plan.get(name), name


def test_a_fused_linear_names_its_fusion_and_why_others_are_not_in_it() -> None:
    found = explain("1.attention.q")
    assert found.members == (("norm", "1.norm1"), ("linear", "1.attention.q"), ("linear", "1.attention.v"))
    assert found.source == "1.norm1 (RMSNorm, FUSED)"
    assert found.companions == {
        "1.attention.k": "not joined: they differ in bias or none",
        "1.attention.v": "joined with it in 1.attention.layernorm_qv",
    }
    assert said(found, "linear").result == "claimed"
    assert said(found, "conv1d").miss == "linear has decided"
    assert said(found, "norm-linear").result == "claimed"
    assert "no second Linear follows" in said(found, "norm-mlp").miss or "same norm" in said(found, "norm-mlp").miss
    assert said(found, "transformer-block", "1").miss == "its residual is not its input"
    assert (found.trial and found.trial.executed, found.trial and found.trial.fallbacks) == (2, 0)


def test_a_norm_that_somebody_else_reads() -> None:
    found = explain("1.norm2")
    assert found.decision is not None
    assert found.decision.replacement == "te.LayerNorm"
    attempt = said(found, "norm-linear")
    assert (attempt.result, codes(attempt), attempt.about) == ("refused", ["fusion.other-reader"], ("1.norm2", "1.fc1"))
    assert attempt.reasons[0].detail == "also read by mean in 1"
    assert found.facts["eps"] == "1e-05"
    assert "rms-norm has decided" not in said(found, "linear").miss


def test_the_reader_of_such_a_norm_says_so_too() -> None:
    assert codes(said(explain("1.fc1"), "norm-linear")) == ["fusion.other-reader"]


def test_written_attention_that_te_knows_was_tried() -> None:
    found = explain("1.attention")
    assert said(found, "eager-attention").result == "claimed"
    assert found.facts["between the two products"] == "mul"
    assert found.trial is not None
    assert (found.trial.backend, found.trial.executed, found.trial.why_not) == ("reference", 2, {})


def test_written_attention_that_te_does_not_know_says_what_stands_between() -> None:
    found = explain("2.attention")
    attempt = said(found, "eager-attention")
    assert (attempt.result, codes(attempt)) == ("refused", ["attention.eager-region"])
    assert "tanh" in attempt.reasons[0].detail
    assert found.facts["between the two products"] == "mul, tanh"
    assert found.trial is None


def test_why_calls_ran_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    import te_convert.rewrite.eager_attention as eager

    monkeypatch.setattr(eager, "find_masking", lambda scores, heads: None)
    trial = explain("1.attention").trial
    assert trial is not None
    assert (trial.executed, trial.why_not) == (0, {"TE has no such mask or bias": 2})


def test_near_misses_of_single_modules() -> None:
    scaled = explain("3")
    assert (said(scaled, "linear").result, codes(said(scaled, "linear"))) == ("refused", ["module.subclass"])
    embedding = explain("0")
    assert said(embedding, "linear").miss.startswith("it looks for: ")
    idle = said(explain("1.idle"), "linear")
    assert (idle.result, codes(idle)) == ("refused", ["module.never-called"])
    assert idle.reasons[0].hint


def test_what_the_probe_saw_when_a_rule_passed() -> None:
    class Almost(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight.T).relu()

    found = te_convert.explain(nn.Sequential(Almost()), "0", (torch.randn(2, 8),))
    assert (said(found, "linear").result, said(found, "conv1d").result) == ("not its case", "not its case")
    assert said(found, "linear").miss
    assert not said(found, "linear").miss.startswith("it looks for")
    norm = te_convert.explain(nn.Sequential(nn.RMSNorm(8, eps=1e-6)), "0", (torch.randn(2, 8),))
    assert said(norm, "rms-norm").result == "claimed"


def test_linears_of_one_input_that_differ() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.sin()
            return self.a(x) + self.b(x)  # type: ignore[no-any-return]

    found = te_convert.explain(Two(), "a", (torch.randn(2, 8),))
    assert said(found, "shared-linear").miss == "they differ in requires_grad"
    assert said(found, "norm-linear").miss == "no norm that is read by Linears alone makes their input"
    assert found.companions == {"b": "not joined: they differ in requires_grad"}
    assert found.source == "sin in the root"


def test_a_whole_block_takes_what_is_inside() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, activation="relu")
    model = nn.Sequential(layer)
    found = te_convert.explain(model, "0.linear1", (torch.randn(2, 5, 16),))
    assert said(found, "torch-encoder-layer", "0").result == "claimed"
    inside = te_convert.explain(model, "0.self_attn", (torch.randn(2, 5, 16),))
    assert said(inside, "eager-attention").miss == "torch-encoder-layer takes 0 as a whole"


def test_the_graph_around_a_site() -> None:
    found = explain("1.norm2", context=1)
    assert [(line.place, line.operation) for line in found.graph] == [
        ("before", "add"),
        ("site", "1.norm2"),
        ("after", "1.fc1"),
        ("after", "mean"),
    ]
    site = found.graph[1]
    assert (site.shape, site.dtype, site.where, site.readers) == ((2, 7, 32), "float32", "1", ("_1_fc1", "mean"))
    around, whole = explain("1", context=1), explain("1", context=20)
    shown = [sum(line.place == "site" for line in each.graph) for each in (around, whole)]
    assert (shown[0], whole.hidden) == (2, 0)
    assert around.hidden == shown[1] - 2
    assert explain("1.idle").graph == ()


def test_the_model_is_as_it_was() -> None:
    before = copy.deepcopy(MODEL.state_dict())
    classes = [type(module) for module in MODEL.modules()]
    explain("1.attention")
    assert classes == [type(module) for module in MODEL.modules()]
    assert all(torch.equal(before[name], value) for name, value in MODEL.state_dict().items())


def test_a_meta_model_has_no_trial() -> None:
    with torch.device("meta"):
        model, _ = sample()
    found = te_convert.explain(model, "1.attention.q", (torch.zeros(2, 7, dtype=torch.int64, device="meta"),))
    assert found.decision is not None
    assert found.trial is None


def test_a_converted_site_keeps_its_decision() -> None:
    model = te_convert.convert(MODEL, INPUTS, verify=False).model
    found = te_convert.explain(model, "1.norm2", INPUTS)
    assert found.decision is not None
    assert (found.decision.replacement, found.attempts) == ("te.LayerNorm", ())


def test_excluded_sites_say_so() -> None:
    found = explain("1.fc1", exclude="1.fc1")
    assert found.decision is not None
    assert [why.code for why in found.decision.reasons if why.code.startswith("user.")] == ["user.excluded"]


def test_names_of_tied_modules_are_all_known() -> None:
    linear = nn.Linear(8, 8)
    model = nn.Sequential(linear, nn.ReLU(), linear)
    assert te_convert.explain(model, "2", (torch.randn(2, 8),)).fqn == "0"
    assert te_convert.explain(model, "(root)", (torch.randn(2, 8),)).fqn == ""


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("1.atention.q", "Sequential has no module '1.atention.q'", "did you mean 1.attention.q or "),
        ("1.fc1.weight", "1.fc1.weight is a tensor of 1.fc1, not a module", "explain 1.fc1"),
        ("zzzzzzzzzz", "Sequential has no module 'zzzzzzzzzz'", "te-convert explain MODEL --list names all sites"),
    ],
)
def test_a_name_that_is_none(name: str, message: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        explain(name)
    assert str(caught.value) == message
    assert caught.value.hint.startswith(hint)


def test_bad_arguments() -> None:
    with pytest.raises(InputError, match="context is -1"):
        explain("1", context=-1)
    with pytest.raises(InputError, match="the model fails on the example inputs"):
        te_convert.explain(MODEL, "1", (torch.randn(2),))


def test_json_is_strict() -> None:
    for name in ("1.attention.q", "1.attention", "1", "0", "(root)"):
        data = json.loads(json.dumps(explain(name).to_dict(), allow_nan=False))
        assert (data["schema"], data["fqn"]) == (1, "" if name == "(root)" else name)


def test_a_rule_that_breaks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_convert.rules.linear import LinearRule
    from te_convert.rules.norm_linear import NormLinearRule

    def broken(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(NormLinearRule, "propose", broken)
    attempt = said(explain("1.attention.q"), "norm-linear", "1.norm1")
    assert (attempt.result, codes(attempt)) == ("refused", ["fusion.failed"])
    monkeypatch.setattr(LinearRule, "recognise", broken)
    assert codes(said(explain("1.attention.q"), "linear")) == ["internal.error"]
