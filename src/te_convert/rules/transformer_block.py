"""A transformer block of any class that a probe proves equal  ->  te.TransformerLayer, in its place.

    pre-norm, post-norm or parallel, as in match/transformer_blocks.py; one tensor [batch, sequence, hidden] in and out

The block and the TE layer are run on random input with perturbed norms and biases, at two shapes; only equal results convert.
Only without dropout; a block with erf GELU stays in parts unless the approximation is allowed.
"""

from __future__ import annotations

from te_convert.match.block_parts import block_obstacles, block_ops, block_spec, looks_like_block, parts_in_all_calls, te_activation
from te_convert.match.blocks import Block
from te_convert.match.fusion import Fusion
from te_convert.match.groups import Found
from te_convert.match.proof import first_difference
from te_convert.match.torch_layers import LAYER_CHILDREN, approximated, block_members, part_obstacles
from te_convert.match.transformer_blocks import BlockError, Parts
from te_convert.reasons import ReasonCode, reason
from te_convert.replacements.specs import TransformerLayerSpec
from te_convert.rules.base import BlockRule
from te_convert.weights.ops import WeightMap


class TransformerBlockRule(BlockRule):
    """Hand-written blocks: nanoGPT's, timm's, and their like."""

    id = "transformer-block"

    def looks_like(self, block: Block) -> bool:
        """Two norms at most, four Linears or more, and one tensor of three dimensions in and out."""
        return looks_like_block(block)

    def propose(self, block: Block) -> Found:
        """A fusion, if the parts are found in every recorded call and the proof holds."""
        try:
            parts, mlp = parts_in_all_calls(block)
        except BlockError:  # most modules are no blocks
            return Found()
        activation, approximation, unlike = te_activation(block, mlp)
        obstacles = [*part_obstacles(block.site.module, LAYER_CHILDREN), *block_obstacles(block, parts), *unlike]
        if obstacles:
            return Found(advices={block.site.fqn: tuple(obstacles)})
        weights = WeightMap(block_ops(block, parts, mlp))
        spec, difference = block.cached_deep(lambda: _prove(block, parts, activation, weights, bool(approximation)))
        if difference:
            return Found(advices={block.site.fqn: (reason(ReasonCode.BLOCK_FORM, difference),)})
        fqn = block.site.fqn
        precision = block.precision(spec.hidden_size, spec.ffn_hidden_size)
        fusion = Fusion(fqn, fqn, self.id, block_members(block), spec, weights, precision, approximation=approximation)
        return Found((fusion,), approximated(fqn, approximation))

    def miss(self, block: Block) -> str:
        """Why its parts are not those of a block."""
        try:
            parts_in_all_calls(block)
        except BlockError as error:
            return str(error)
        return ""


def _prove(block: Block, parts: Parts, activation: str, weights: WeightMap, approximate: bool) -> tuple[TransformerLayerSpec, str]:
    """The spec whose twin gives the block's results, and ""; or the last one tried, and how it differs."""
    masks = ("causal", "no_mask") if parts.is_causal is None else ("causal" if parts.is_causal else "no_mask",)
    for mask in masks:
        spec = block_spec(block, parts, activation, mask)
        difference = first_difference(block, spec, weights, approximate=approximate)
        if not difference:
            break
    return spec, difference
