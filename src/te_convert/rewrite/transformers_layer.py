"""Transformers layers on te.TransformerLayer: the layer stays, and lets the TE layer work where a call says no more than a mask."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from te_convert.capture.values import describe_argument
from te_convert.facts.attention import NAMES, base_implementation
from te_convert.match.block_parts import dropout_attributes
from te_convert.match.layer_calls import CAPTURING, bind_arguments, extra_arguments, has_cache, takes_mask
from te_convert.match.torch_layers import has_hooks
from te_convert.replacements.specs import TransformerLayerSpec, torch_dtype
from te_convert.rewrite.attention import register, unless_unsupported
from te_convert.rewrite.attention_masks import mask_facts
from te_convert.rewrite.blocks import drops, would_round_residuals
from te_convert.rewrite.fused import RECORDS, FusedRecord, Inputs
from te_convert.rewrite.lazy import can_defer
from te_convert.rewrite.loans import Borrower


@dataclass(frozen=True)
class LayerRun:
    """A call of the layer together with TE's way to mask it: what verification repeats.

    Attributes:
        args, kwargs: as the layer was called.
        hidden: the hidden states [b, s, h].
        options: TE's mask and mask type.
        valid: bool [b, s]: positions that are no padding; None for all.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden: Tensor
    options: dict[str, Any]
    valid: Tensor | None = None

    def converted(self, module: Any) -> Tensor:
        """te.TransformerLayer on the call."""
        y: Tensor = module.te_forward(self.hidden, **self.options)
        return y

    def visible(self, y: Tensor) -> Tensor:
        """An output with zeros at padding, whose result nobody may use."""
        return y if self.valid is None else y.masked_fill(~self.valid[:, :, None], 0.0)


@dataclass(eq=False)
class LayerRecord(FusedRecord):
    """What a te.TransformerLayer beside a Transformers layer's parts knows about itself.

    Attributes:
        configs: the configs whose attention implementation was exchanged, so that masks say what they mean.
    """

    configs: list[Any] = field(default_factory=list)

    @property
    def layer(self) -> Any:
        """The layer whose work it does."""
        return self.members[0][1]

    @property
    def attends(self) -> Any:
        """The layer's attention module."""
        return self.role("attends")[0]

    def intact(self) -> bool:
        """False when a part was replaced, got another forward, or has a hook that would run now."""
        collected = _collected()
        for (_, part), member in zip(self.members[1:], self.decision.members[1:], strict=True):
            found: Any = self.layer
            for name in member.fqn.removeprefix(f"{self.decision.scope}.").split("."):
                found = found._modules.get(name) if found is not None else None
            if found is not part or "forward" in part.__dict__ or has_hooks(part, collected):
                return False
        return True

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerRun | None:
        """How TE computes a call, or None."""
        try:
            values = bind_arguments(self.layer, args, kwargs)
        except TypeError:
            return None  # the original raises its own error
        given = {name: describe_argument(value) for name, value in values.items()}
        if not given or has_cache(given) or extra_arguments(given):
            return None
        tensors = [value for value in values.values() if isinstance(value, Tensor)]
        hidden = tensors[0]
        if hidden.dim() != 3 or hidden.numel() == 0 or not all(map(can_defer, tensors)) or would_round_residuals([hidden]):
            return None
        active = self.layer.training and any(drops(part) or dropout_attributes(part) for part in self.layer.modules())
        if active or not self.intact():
            return None
        masking = self._masking(hidden, values.get("attention_mask"), values.get("is_causal"))
        return None if masking is None else LayerRun(args, kwargs, hidden, *masking)

    def _masking(self, hidden: Tensor, mask: Tensor | None, is_causal: bool | None) -> tuple[dict[str, Any], Tensor | None] | None:
        """TE's options and the valid positions for a mask as Transformers made it."""
        batch, length, _ = hidden.shape
        implementation = self.attends.config._attn_implementation
        if implementation not in NAMES.values():
            return None  # somebody chose another one since
        if mask is None:
            told = getattr(self.attends, "is_causal", True) if is_causal is None else is_causal
            causal = base_implementation(implementation) == "sdpa" and bool(told)
            kind = "causal" if causal else "no_mask"
            return ({"self_attn_mask_type": kind}, None) if kind == self._spec.self_attn_mask_type else None
        facts = mask_facts(mask)
        if facts is None or not facts.fits(mask, length, length) or facts.pattern is None or not facts.right:
            return None
        if facts.pattern.window is not None or facts.shift != 0 or (facts.valid is not None and facts.valid.shape[0] != batch):
            return None
        if facts.pattern.causal:
            return {"self_attn_mask_type": "causal"}, facts.valid
        if facts.valid is None:
            return {"self_attn_mask_type": "no_mask"}, None
        padded = facts.valid.logical_not()[:, None, None, :]
        return {"self_attn_mask_type": "padding", "attention_mask": padded}, facts.valid

    @property
    def _spec(self) -> TransformerLayerSpec:
        spec = self.decision.spec
        assert isinstance(spec, TransformerLayerSpec)
        return spec

    def attempt(self, run: LayerRun) -> Tensor | None:
        """The TE layer's output, or None where no backend of TE's computes it."""
        return unless_unsupported(lambda: run.converted(self.module))

    def run_again(self, inputs: Inputs) -> Tensor:
        """The TE layer on a call that was observed."""
        run: LayerRun = inputs[0][0]
        return run.visible(run.converted(self.module))

    def run_original(self, inputs: Inputs, own: Any = None) -> Tensor:
        """The layer's own forward on a call that was observed."""
        run: LayerRun = inputs[0][0]
        with self.off(own):
            return run.visible(self.layer.eager(*run.args, **run.kwargs))

    def sample_inputs(self) -> Inputs | None:
        """Seeded random hidden states [2, 7, h] without a mask, for a site that no run reached."""
        like = next(self.module.parameters())
        hidden = torch.randn(2, 7, self._spec.hidden_size, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        hidden = hidden.to(like.device, torch_dtype(self._spec.dtype))
        kind = self._spec.self_attn_mask_type
        kwargs: dict[str, Any] = {"attention_mask": None} if takes_mask(self.layer) else {}
        if kind == "causal" and not getattr(self.attends, "is_causal", True):
            kwargs["is_causal"] = True  # its recorded calls said so
        run = LayerRun((hidden,), kwargs, hidden, {"self_attn_mask_type": kind})
        return ((run,), {})

    def __deepcopy__(self, memo: Any) -> LayerRecord:
        new = LayerRecord(self.decision, nn.Module(), nn.Module(), self.backend, enabled=self.enabled)
        memo[id(self)] = new
        new.module, new.scope = copy.deepcopy(self.module, memo), copy.deepcopy(self.scope, memo)
        new.members, new.configs = copy.deepcopy(self.members, memo), copy.deepcopy(self.configs, memo)
        return new

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickling in a process that has converted nothing yet registers the functions again."""
        self.__dict__.update(state)
        register()


def _collected() -> Any:
    """What Transformers is collecting by its hooks now, or None."""
    active: Any = getattr(sys.modules.get(CAPTURING), "_active_collector", None)
    return None if active is None else active.get()


class TransformersLayer(Borrower):
    """A Transformers layer whose TE layer runs where it can."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the original."""
        record: LayerRecord = self.__dict__[RECORDS]
        run = record.plan(args, kwargs) if record.enabled else None
        y = None if run is None else record.attempt(run)
        if run is None or y is None:
            record.fallbacks += record.enabled
            return self.eager(*args, **kwargs)
        record.ran(((run,), {}), run.visible(y))
        return y
