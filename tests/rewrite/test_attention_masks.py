"""What a mask says about itself, and how a call is masked on TE."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_convert.rewrite import attention_call
from te_convert.rewrite.attention_call import AttentionInput
from te_convert.rewrite.attention_masks import Pattern, mask_facts
from tests.rewrite import attention_models as zoo
from tests.rewrite.test_attention import convert


def make_mask(name: str, **arguments: Any) -> Any:
    import transformers.masking_utils as masking

    convert(zoo.llama(), zoo.inputs_of("llama"))
    sizes = {"batch_size": 2, "q_length": 6, "kv_length": 6, "allow_is_causal_skip": False, "dtype": torch.float32}
    return masking.ALL_MASK_ATTENTION_FUNCTIONS[name](**{**sizes, **arguments})


@pytest.mark.parametrize("name", ["te_convert", "te_convert_eager"])
def test_facts_of_masks(name: str) -> None:
    import transformers.masking_utils as masking

    patterns = {
        Pattern(causal=True): masking.causal_mask_function,
        Pattern(causal=False): masking.bidirectional_mask_function,
        Pattern(causal=True, window=3): masking.sliding_window_causal_mask_function(3),
        Pattern(causal=False, window=2): masking.sliding_window_bidirectional_mask_function(2),
        None: masking.and_masks(masking.causal_mask_function, lambda b, h, q, k: q > k),
    }
    for pattern, function in patterns.items():
        facts = mask_facts(make_mask(name, mask_function=function))
        assert facts is not None
        assert (facts.pattern, facts.queries, facts.keys, facts.shift, facts.valid) == (pattern, 6, 6, 0, None)


def test_chunked_masks_are_not_known() -> None:
    import transformers.masking_utils as masking

    function = masking.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int))
    facts = mask_facts(make_mask("te_convert", mask_function=function))
    assert facts is not None
    assert facts.pattern is None


def test_padding_of_masks() -> None:
    everything, right, left = (
        zoo.padding("right", 0, 0, length=6),
        zoo.padding("right", 0, 2, length=6),
        zoo.padding("left", 0, 2, length=6),
    )
    for padding, expected in ((everything, (True, True)), (right, (False, True)), (left, (False, False))):
        facts = mask_facts(make_mask("te_convert", attention_mask=padding.bool()))
        assert facts is not None
        assert (facts.valid is None, facts.right) == expected


def test_a_changed_or_cut_mask_is_not_trusted() -> None:
    mask = make_mask("te_convert")
    facts = mask_facts(mask)
    assert facts is not None
    assert facts.fits(mask, 6, 6)
    assert not facts.fits(mask, 6, 5)
    assert mask_facts(mask[:, :, :3]) is None
    changed = make_mask("te_convert_eager")
    before = mask_facts(changed)
    changed[0, 0, 0, 1] = 0.0
    assert before is not None
    assert not before.fits(changed, 6, 6)


@pytest.mark.parametrize(
    ("queries", "keys", "expected"),
    [(6, 6, "causal"), (1, 6, "no_mask"), (2, 6, "causal"), (6, 4, None)],
)
def test_masking_without_a_mask_follows_sdpa(queries: int, keys: int, expected: str | None) -> None:
    module = torch.nn.Module()
    query, key = torch.randn(1, 2, queries, 4), torch.randn(1, 2, keys, 4)
    call = AttentionInput(module, query, key, key, None, None, 0.0, {}, "sdpa", lambda *_, **__: (query, None))
    masking = attention_call.find_masking(call)
    assert (None if masking is None else masking.mask_type) == expected
    if (queries, keys) == (2, 6):
        assert masking is not None
        assert masking.keys == 2  # SDPA's causal mask starts in the top left corner
