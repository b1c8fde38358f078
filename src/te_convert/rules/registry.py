"""The rules, in the order in which they look at a module, plus those of third parties."""

from __future__ import annotations

from importlib import metadata

from te_convert.errors import InputError
from te_convert.rules.base import AnyRule, BlockRule, FusionRule, Rule
from te_convert.rules.conv1d import Conv1DRule
from te_convert.rules.expert_modules import ExpertModulesRule
from te_convert.rules.experts import ExpertsRule
from te_convert.rules.layer_norm import LayerNormRule
from te_convert.rules.linear import LinearRule
from te_convert.rules.norm_linear import NormLinearRule
from te_convert.rules.norm_mlp import NormMLPRule
from te_convert.rules.rms_norm import RMSNormRule
from te_convert.rules.shared_linear import SharedLinearRule
from te_convert.rules.torch_attention import TorchAttentionRule
from te_convert.rules.torch_layer import TorchDecoderLayerRule, TorchEncoderLayerRule
from te_convert.rules.transformer_block import TransformerBlockRule
from te_convert.rules.transformers_layer import TransformersLayerRule

BUILTIN_RULES: tuple[AnyRule, ...] = (LinearRule(), Conv1DRule(), LayerNormRule(), RMSNormRule())
BLOCK_RULES: tuple[BlockRule, ...] = (
    TorchEncoderLayerRule(),
    TorchDecoderLayerRule(),
    TorchAttentionRule(),
    TransformersLayerRule(),
    TransformerBlockRule(),
    ExpertsRule(),
    ExpertModulesRule(),
)
"""Asked about every module, outermost first; what one takes, nobody else sees."""
FUSION_RULES: tuple[FusionRule, ...] = (NormMLPRule(), NormLinearRule(), SharedLinearRule())
"""In order of preference: what an earlier one takes, a later one does not see."""
ENTRY_POINT_GROUP = "te_convert.rules"


def _load(entry: metadata.EntryPoint) -> AnyRule:
    try:
        loaded = entry.load()
        rule = loaded() if isinstance(loaded, type) else loaded
    except Exception as error:  # whatever another package's import raises
        raise InputError(
            f"entry point {entry.name!r} of {ENTRY_POINT_GROUP} fails: {type(error).__name__}: {error}",
            "remove or fix that package",
        ) from error
    if not isinstance(rule, Rule):
        raise InputError(f"entry point {entry.name!r} of {ENTRY_POINT_GROUP} is not a Rule", "remove or fix that package")
    return rule


def load_rules() -> tuple[AnyRule, ...]:
    """Third-party rules (entry point group ``te_convert.rules``) first, then the built-in ones.

    Raises:
        InputError: an entry point fails or is not a rule, or two rules share an id.
    """
    found: list[AnyRule] = []
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        found.append(_load(entry))
    rules = (*found, *BUILTIN_RULES)
    ids = [rule.id for rule in rules]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise InputError(f"two rules are called {', '.join(twice)}", "rules need distinct ids")
    return rules
