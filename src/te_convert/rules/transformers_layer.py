"""A Transformers layer that a probe proves equal  ->  te.TransformerLayer beside its parts, for calls without a cache.

    GPT-2, BERT, CLIP, ...: layer(hidden, attention_mask=...)  ->  layer.transformer_layer(hidden, mask type)

The layer stays in its place (hooks, checkpointing and attributes too) and lets the TE layer work where the call says no more than
a mask.  Proved on random input without a mask and under a random one, with perturbed norms and biases, at two shapes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_convert.capture.graph import ModuleCall, Recording
from te_convert.facts.attention import NAMES, base_implementation
from te_convert.match.block_parts import block_obstacles, block_ops, block_spec, looks_like_block, parts_in_all_calls, te_activation
from te_convert.match.blocks import Block
from te_convert.match.fusion import Fusion, Member
from te_convert.match.groups import Found
from te_convert.match.layer_calls import bound_call, extra_arguments, has_cache, takes_mask
from te_convert.match.proof import first_difference
from te_convert.match.torch_layers import approximated, part_obstacles
from te_convert.match.transformer_blocks import BlockError, Parts, find_parts
from te_convert.reasons import ReasonCode, reason
from te_convert.replacements.specs import TransformerLayerSpec
from te_convert.rules.base import BlockRule
from te_convert.weights.ops import WeightMap

NAME = "transformer_layer"
"""Of the TE layer among the layer's children."""


class TransformersLayerRule(BlockRule):
    """Layers whose one attention asks Transformers' AttentionInterface."""

    id = "transformers-layer"

    def looks_like(self, block: Block) -> bool:
        """A block with one attention of Transformers' in it."""
        return looks_like_block(block) and len(_attentions(block)) == 1

    def propose(self, block: Block) -> Found:
        """A fusion, if the parts are found in every recorded call, none fills a cache, and the proof holds."""
        (name,) = _attentions(block)
        base = base_implementation(str(getattr(_config(block, name), "_attn_implementation", None)))
        try:
            given = [bound_call(block.site.module, call) for call in block.site.calls]
            if base not in NAMES or any(arguments.get("is_causal") != given[0].get("is_causal") for arguments in given):
                return Found()
            parts, mlp = parts_in_all_calls(block, _parse)
        except BlockError:  # most modules are no such layers
            return Found()
        activation, approximation, unlike = te_activation(block, mlp)
        obstacles = [*part_obstacles(block.site.module, frozenset({NAME})), *block_obstacles(block, parts), *unlike]
        if any(map(has_cache, given)):
            obstacles.append(reason(ReasonCode.BLOCK_CACHE, "its calls bring a cache"))
        if obstacles:
            return Found(advices={block.site.fqn: tuple(obstacles)})
        weights = WeightMap(block_ops(block, parts, mlp))
        proof = _Proof(block, base, given[0])
        spec, difference = block.cached_deep(lambda: proof.run(parts, activation, weights, bool(approximation)))
        if difference:
            return Found(advices={block.site.fqn: (reason(ReasonCode.BLOCK_FORM, difference),)})
        fqn = block.site.fqn
        place = f"{fqn}.{NAME}" if fqn else NAME
        precision = block.precision(spec.hidden_size, spec.ffn_hidden_size)
        fusion = Fusion(place, fqn, self.id, _members(block, name), spec, weights, precision, approximation=approximation)
        return Found((fusion,), approximated(fqn, approximation))

    def miss(self, block: Block) -> str:
        """Why its parts are not those of a layer, or its calls not those of one."""
        try:
            given = [bound_call(block.site.module, call) for call in block.site.calls]
            if any(arguments.get("is_causal") != given[0].get("is_causal") for arguments in given):
                return "its calls differ in is_causal"
            parts_in_all_calls(block, _parse)
        except BlockError as error:
            return str(error)
        return "its attention implementation is none of those that are known"


def _attentions(block: Block) -> list[str]:
    prefix = f"{block.site.fqn}." if block.site.fqn else ""
    calls = [call.fqn for recording in block.capture.recordings for call in recording.attention]
    return [name for name in dict.fromkeys(calls) if name.startswith(prefix)]


def _config(block: Block, name: str) -> Any:
    return getattr(block.modules[name], "config", None)


def _parse(block: Block, recording: Recording, call: ModuleCall) -> Parts:
    del recording
    given = bound_call(block.site.module, call)
    extra = extra_arguments(given)
    if extra or not call.single or call.given[0] != "tensor":
        raise BlockError(f"it takes or gives more than hidden states: {', '.join(extra)}")
    return find_parts(block, call, masked=True, cached=has_cache(given))


def _members(block: Block, attention: str) -> tuple[Member, ...]:
    """The layer and everything inside, also what has no parameters: a part that is replaced or hooked later ends the fusion."""
    prefix = f"{block.site.fqn}." if block.site.fqn else ""
    names = [prefix + name for name, _ in block.site.module.named_modules() if name]
    parts = [Member("attends" if name == attention else "part", name) for name in names]
    return (Member("block", block.site.fqn), *parts)


class _Proof:
    """The layer against TE's, without a mask and under a random one."""

    def __init__(self, block: Block, base: str, given: dict[str, str]) -> None:
        self.block, self.base = block, base
        self.options: dict[str, Any] = (
            {"is_causal": given["is_causal"] == "True"} if given.get("is_causal", "None") != "None" else {}
        )
        self.places = given.get("position_ids") == "tensor"

    def run(self, parts: Parts, activation: str, weights: WeightMap, approximate: bool) -> tuple[TransformerLayerSpec, str]:
        """The spec whose twin gives the layer's results, and ""; or the last one tried, and how it differs."""
        for mask in ("causal", "no_mask"):
            spec = block_spec(self.block, parts, activation, mask)
            difference = first_difference(self.block, spec, weights, approximate, self._runs)
            if not difference:
                break
        return spec, difference

    def _runs(self, x: Tensor) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        batch, length, _ = x.shape
        generator = torch.Generator().manual_seed(1)
        options = dict(self.options)
        if self.places:
            options["position_ids"] = torch.randperm(length, generator=generator).to(x.device)[None]
        takes = takes_mask(self.block.site.module)
        runs: list[tuple[dict[str, Any], dict[str, Any]]] = [({**options, **({"attention_mask": None} if takes else {})}, {})]
        if takes:
            keep = torch.rand(batch, 1, length, length, generator=generator) > 0.4
            keep = (keep | torch.eye(length, dtype=torch.bool)).to(x.device)
            added = torch.zeros(keep.shape, device=x.device).masked_fill(~keep, torch.finfo(torch.float32).min)
            mask = {"attention_mask": keep if self.base == "sdpa" else added}
            runs.append(({**options, **mask}, {"attention_mask": ~keep, "self_attn_mask_type": "arbitrary"}))
        return runs
