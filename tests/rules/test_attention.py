"""The attention rule: what it builds, what it refuses, and the numeric probe behind it."""

from __future__ import annotations

import math
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_convert
from te_convert.capture.attention import AttentionCall
from te_convert.facts.attention import AttentionFacts, is_understood, probe_attention
from te_convert.facts.stand_in import ProbeError
from te_convert.match import attention as match
from te_convert.plan.model import Plan
from te_convert.replacements.specs import DotProductAttentionSpec
from tests.rewrite import attention_models as zoo


def sites(plan: Plan) -> list[Any]:
    return [site for site in plan.sites if site.kind == "Attention"]


@pytest.mark.parametrize(
    ("name", "groups", "scale", "dropout", "softcap"),
    [
        ("llama", 2, None, 0.0, 0.0),
        ("gemma2", 2, 256**-0.5, 0.0, 2.0),
        ("gpt2", 4, None, 0.1, 0.0),
        ("bert", 4, None, 0.1, 0.0),
        ("vit", 4, None, 0.0, 0.0),
    ],
)
def test_spec(name: str, groups: int, scale: float | None, dropout: float, softcap: float) -> None:
    for site in sites(te_convert.analyze(zoo.CONVERTED[name](), zoo.inputs_of(name))):
        assert site.spec == DotProductAttentionSpec(4, (8, 8), groups, scale, dropout, "float32", softcap)
        assert site.rule == "attention"
        assert site.fused_into == f"{site.fqn}.core_attention"
        assert site.flops > 0


def test_plan_survives_json() -> None:
    plan = te_convert.analyze(zoo.gemma2(), zoo.inputs_of("gemma2"))
    assert Plan.from_dict(plan.to_dict()) == plan


def test_decisions_stand_where_their_modules_do() -> None:
    names = [site.fqn for site in te_convert.analyze(zoo.llama(), zoo.inputs_of("llama")).sites]
    first = names.index("model.layers.0.self_attn")
    assert names[first + 1] == "model.layers.0.self_attn.q_proj"


def test_a_taken_name_is_avoided() -> None:
    model = zoo.llama()
    model.model.layers[0].self_attn.core_attention = "mine"
    assert sites(te_convert.analyze(model, zoo.inputs_of("llama")))[0].fused_into == "model.layers.0.self_attn.core_attention_"


def test_a_model_without_attention_functions_has_no_attention_site() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    assert not sites(te_convert.analyze(layer, torch.randn(2, 5, 16)))


def some_call(**changes: Any) -> AttentionCall:
    def function(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any: ...

    shape = (2, 4, 5, 8)
    call = AttentionCall("attn", "sdpa", function, shape, shape, shape, torch.float32, None, 0.0, False, (), (), 5)
    return replace(call, **changes)


def site_of(*calls: AttentionCall) -> match.AttentionSite:
    from te_convert.capture.graph import Capture
    from te_convert.match.candidate import find_candidates

    return match.AttentionSite(find_candidates(nn.Module(), Capture(), None)[0], calls, ())


@pytest.mark.parametrize(
    "changes", [{"query": (2, 8, 5, 8)}, {"scaling": 0.5}, {"options": (("softcap", 3.0),)}, {"scaling": torch.ones(())}]
)
def test_calls_that_differ_are_refused(changes: dict[str, Any]) -> None:
    facts, reasons = match.check_attention(site_of(some_call(), some_call(**changes)))
    assert facts is None
    assert "attention.calls-differ" in [reason.code for reason in reasons]


def test_two_dropouts_differ_and_none_in_evaluation_does_not() -> None:
    training, evaluation = some_call(dropout=0.1, training=True), some_call()
    assert match.check_attention(site_of(training, evaluation))[0] is not None
    assert match.check_attention(site_of(training, some_call(dropout=0.2)))[0] is None
    assert site_of(evaluation, training).dropout == 0.1


@pytest.mark.parametrize(
    ("biases", "biased"),
    [
        ([(1, 4, 5, 5)], True),
        ([(1, 4, 5, 5), (1, 4, 5, 5)], True),
        ([(1, 4, 5, 5), None], False),
        ([(2, 4, 5, 5)], True),
        ([(1, 1, 5, 5)], True),
        ([(3, 4, 5, 5)], False),
        ([(1, 2, 5, 5)], False),
        ([(1, 4, 1, 5)], False),
        ([(4, 5, 5)], False),
        ([None], False),
    ],
)
def test_a_bias_is_one_that_every_call_brings(biases: list[Any], biased: bool) -> None:
    calls = [some_call(bias=bias, tensors=() if bias is None else ("position_bias",)) for bias in biases]
    found = site_of(*calls)
    facts, reasons = match.check_attention(found)
    assert facts is not None
    assert (found.is_biased, facts.bias) == (biased, biased)
    refused = "attention.extra-inputs" in [reason.code for reason in reasons]
    assert refused == (not biased and None not in biases)


def test_no_other_tensor_comes_with_a_bias() -> None:
    _, reasons = match.check_attention(site_of(some_call(bias=(1, 4, 5, 5), tensors=("position_bias", "sinks"))))
    assert "attention.extra-inputs" in [reason.code for reason in reasons]


def test_heads_of_keys_and_of_values_differ() -> None:
    _, reasons = match.check_attention(site_of(some_call(key=(2, 2, 5, 8))))
    found = [(reason.code, reason.detail) for reason in reasons]
    assert ("attention.extra-inputs", "2 heads of keys and 4 of values") in found


def test_heads_that_do_not_divide() -> None:
    assert match.check_attention(site_of(some_call(key=(2, 3, 5, 8), value=(2, 3, 5, 8))))[0] is None


@pytest.mark.parametrize(
    ("tensors", "options", "understood"),
    [
        ((), {}, True),
        (("position_ids", "cache_position"), {"use_cache": True, "sliding_window": 4}, True),
        (("sinks",), {}, False),
        (("s_aux",), {}, False),
        ((), {"is_causal": True, "softcap": 2.0}, True),
        ((), {"clip": 3.0}, False),
    ],
)
def test_further_arguments(tensors: tuple[str, ...], options: dict[str, Any], understood: bool) -> None:
    def function(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, clip: Any = None, **kwargs: Any) -> Any: ...

    assert (is_understood(function, tensors, options) == "") is understood


# ---- the numeric probe ------------------------------------------------------------------------------------------------
def formula(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = scale * (query @ key.mT) + (0.0 if mask is None else mask)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def eager(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, dropout: float) -> Any:
    return formula(query, key, value, mask, scaling), None


def scale_ignored(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, dropout: float) -> Any:
    return formula(query, key, value, mask, 1.0), None


def mask_ignored(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, dropout: float) -> Any:
    return formula(query, key, value, None, scaling), None


def groups_interleaved(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, dropout: float) -> Any:
    order = torch.tensor([0, 2, 1, 3])
    return formula(query[:, order], key, value, mask, scaling)[:, :, order], None


def with_a_sink(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, dropout: float) -> Any:
    return 0.9 * formula(query, key, value, mask, scaling), None


def heads_first(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, dropout: float) -> Any:
    return formula(query, key, value, mask, scaling).transpose(1, 2), None


def raises(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, dropout: float) -> Any:
    raise ValueError(module)


FACTS = AttentionFacts(4, 2, (8, 6), 1 / math.sqrt(8), 0.0)


def test_probe_accepts_softmax_attention() -> None:
    probe_attention(eager, nn.Module(), FACTS, "eager", {})


@pytest.mark.parametrize("function", [scale_ignored, mask_ignored, groups_interleaved, with_a_sink, heads_first, raises])
@pytest.mark.report("microsoft/onnxruntime#10359", "pytorch/pytorch#100452")
def test_probe_rejects_everything_else(function: Any) -> None:
    with pytest.raises(ProbeError):
        probe_attention(function, nn.Module(), FACTS, "eager", {})


def with_bias(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **options: Any) -> Any:
    bias: Tensor = options["position_bias"]
    return formula(query, key, value, bias if mask is None else mask + bias, scaling), None


def bias_before_the_scale(*args: Any, **options: Any) -> Any:
    return with_bias(*args, **{**options, "position_bias": options["position_bias"] * options["scaling"]})


def bias_ignored(*args: Any, **options: Any) -> Any:
    return with_bias(*args, **{**options, "position_bias": torch.zeros(1)})


def test_probe_of_a_bias() -> None:
    facts = replace(FACTS, bias=True)
    probe_attention(with_bias, nn.Module(), facts, "eager", {})
    for function in (bias_before_the_scale, bias_ignored):
        with pytest.raises(ProbeError, match="without a mask, with a bias"):
            probe_attention(function, nn.Module(), facts, "eager", {})


def with_sinks(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **options: Any) -> Any:
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = scaling * (query @ key.mT) + (0.0 if mask is None else mask)
    sinks = module.sinks.view(1, -1, 1, 1).expand(2, 4, 5, 1)
    return (torch.cat((scores, sinks), -1).softmax(-1)[..., :-1] @ value).transpose(1, 2), None


def sinks_ignored(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **options: Any) -> Any:
    return eager(module, query, key, value, mask, scaling, 0.0)


def sinks_negated(module: Any, *args: Any, **options: Any) -> Any:
    return with_sinks(types.SimpleNamespace(sinks=-module.sinks), *args, **options)


def test_probe_of_sinks() -> None:
    module, facts = nn.Module(), replace(FACTS, sink="sinks")
    module.sinks = nn.Parameter(torch.zeros(4))
    probe_attention(with_sinks, module, facts, "eager", {})
    assert not module.sinks.any()
    for function in (sinks_ignored, sinks_negated):
        with pytest.raises(ProbeError, match="without a mask, with sinks"):
            probe_attention(function, module, facts, "eager", {})


def test_probe_expects_causality_where_the_module_has_it() -> None:
    module = nn.Module()
    with pytest.raises(ProbeError, match="without a mask"):
        probe_attention(eager, module, FACTS, "sdpa", {})
    module.is_causal = False  # type: ignore[assignment]
    with pytest.raises(ProbeError, match="under a mask"):  # SDPA's masks are boolean, and this adds them
        probe_attention(eager, module, FACTS, "sdpa", {})
