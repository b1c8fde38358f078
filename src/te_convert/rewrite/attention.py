"""Transformers' attention on te.DotProductAttention: the functions registered with Transformers, and a site's record."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from te_convert.facts.attention import BIAS, DIRECT, NAMES, SINK, AttentionFunction, base_implementation, own_function
from te_convert.match.fusion import Fusion
from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.reference.unsupported import NotSupportedError
from te_convert.replacements.specs import DotProductAttentionSpec
from te_convert.rewrite.attention_call import AttentionInput, AttentionRun, find_masking, fits_module, understands
from te_convert.rewrite.attention_masks import mask_function
from te_convert.rewrite.direct_attention import RECORD, DirectAttention, torch_attention
from te_convert.rewrite.fused import FusedRecord, Inputs
from te_convert.rewrite.lazy import can_defer
from te_convert.rewrite.loans import give_back, is_borrower, lend

_NO_BACKEND = "No dot product attention backend is available"


def unless_unsupported(call: Callable[[], Tensor]) -> Tensor | None:
    """What TE or a twin computes; None where no backend of theirs computes such a call."""
    try:
        return call()
    except NotSupportedError:
        return None
    except ValueError as error:
        if _NO_BACKEND not in str(error):
            raise
        return None


_EXACT: ContextVar[bool] = ContextVar("te_convert_exact_dropout", default=False)


@contextmanager
def exact_dropout() -> Iterator[None]:
    """Leave calls with active dropout to the original for the time being: no two implementations draw the same numbers."""
    token = _EXACT.set(True)
    try:
        yield
    finally:
        _EXACT.reset(token)


@dataclass(eq=False)
class AttentionRecord(FusedRecord):
    """What a te.DotProductAttention in a Transformers attention module knows about itself.

    Attributes:
        configs: the configs whose attention implementation was exchanged for it.
        function: the module's own attention function, found at its first use.
    """

    configs: list[Any] = field(default_factory=list)
    function: AttentionFunction | None = None

    @property
    def owner(self) -> Any:
        """The attention module."""
        return self.members[0][1]

    @property
    def is_direct(self) -> bool:
        """The module calls torch's function itself."""
        return self.decision.rule == "sdpa"

    def attend(self, call: AttentionInput) -> Tensor | None:
        """The TE module's output [b, s, h, d], counted and observed; None, counted, where it cannot compute the same."""
        drops = call.drops > 0
        if drops and _EXACT.get():
            return None
        run = self._plan(call)
        y = None if run is None else self._try(run)
        if run is None or y is None:
            self.fallbacks += 1
            return None
        if drops:
            self.executed += 1  # two runs draw different numbers, so there is nothing to compare
        else:
            self.ran(((run,), {}), run.visible(y))
        return y

    @property
    def spec(self) -> DotProductAttentionSpec:
        """What the TE module was built from."""
        spec = self.decision.spec
        assert isinstance(spec, DotProductAttentionSpec)
        if self.parallel is None:
            return spec
        heads, groups = spec.num_attention_heads // self.parallel.size, spec.num_gqa_groups // self.parallel.size
        return dataclasses.replace(spec, num_attention_heads=heads, num_gqa_groups=groups)

    def _plan(self, call: AttentionInput) -> AttentionRun | None:
        if not fits_module(call, self.spec, self.module, self.backend) or not understands(call, self.spec, self.module):
            return None
        masking = find_masking(call, self.spec.bias)
        return None if masking is None else AttentionRun(call, masking)

    def _try(self, run: AttentionRun) -> Tensor | None:
        return unless_unsupported(lambda: run.converted(self.module))

    def run_again(self, inputs: Inputs) -> Tensor:
        """The TE module on a call that was observed."""
        run: AttentionRun = inputs[0][0]
        return run.visible(run.converted(self.module))

    def run_original(self, inputs: Inputs, own: Any = None) -> Tensor:
        """The module's own attention function on a call that was observed."""
        del own
        run: AttentionRun = inputs[0][0]
        return run.original()

    def sample_inputs(self) -> Inputs | None:
        """Seeded random queries, keys and values [2, heads, 7, d] and bias without a mask, for a site that no run reached."""
        spec, owner = self.spec, self.owner
        generator = torch.Generator().manual_seed(0)
        sizes = ((spec.num_attention_heads, 0), (spec.num_gqa_groups, 0), (spec.num_gqa_groups, 1))
        parameter = next(owner.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        query, key, value = (
            torch.randn(2, heads, 7, spec.kv_channels[i], generator=generator, dtype=torch.float32).to(
                device, getattr(torch, spec.dtype)
            )
            for heads, i in sizes
        )
        base = DIRECT if self.is_direct else base_implementation(owner.config._attn_implementation)
        bias = (
            torch.randn(1, spec.num_attention_heads, 7, 7, generator=generator, dtype=torch.float32).to(query)
            if spec.bias
            else None
        )
        options: dict[str, Any] = {"softcap": spec.softcap} if spec.softcap else {}
        options |= {BIAS: bias} if spec.bias else {}
        options |= {SINK: self.module.softmax_offset} if spec.softmax_type == "learnable" else {}
        function = self.original_function(base)
        call = AttentionInput(owner, query, key, value, None, spec.softmax_scale, 0.0, options, base, function)
        masking = find_masking(call, spec.bias)
        assert masking is not None
        return ((AttentionRun(call, masking),), {})

    def original_function(self, base: str) -> AttentionFunction:
        """The function that the module's forward would call if it had not been converted."""
        if self.is_direct:
            return torch_attention
        if self.function is None:
            self.function = _original(self.owner, base)
        return self.function

    def __deepcopy__(self, memo: Any) -> AttentionRecord:
        new = AttentionRecord(self.decision, nn.Module(), nn.Module(), self.backend, enabled=self.enabled)
        memo[id(self)] = new
        new.module, new.scope = copy.deepcopy(self.module, memo), copy.deepcopy(self.scope, memo)
        new.members, new.configs = copy.deepcopy(self.members, memo), copy.deepcopy(self.configs, memo)
        new.parallel, new.cuts, new.whole = self.parallel, self.cuts, self.whole
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "function": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickling in a process that has converted nothing yet registers the functions again."""
        self.__dict__.update(state)
        register()


def _original(module: nn.Module, base: str) -> AttentionFunction:
    found = own_function(getattr(module, "_te_base", type(module)), base)  # of a module that lends its sinks
    if found is None:
        raise RuntimeError(f"{type(module).__name__} has no {base} attention function")
    return found


def attention_function(base: str) -> AttentionFunction:
    """The function to register in the place of an implementation."""

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *rest: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        record: AttentionRecord | None = getattr(module, RECORD, None)
        if record is None or not record.enabled or rest or not can_defer(query) or _wants_weights(base):
            function = _original(module, base) if record is None else record.original_function(base)
            if record is not None and record.enabled and can_defer(query):
                record.fallbacks += 1
            return function(module, query, key, value, attention_mask, *rest, scaling=scaling, dropout=dropout, **options)
        call = AttentionInput(
            module, query, key, value, attention_mask, scaling, dropout, options, base, record.original_function(base)
        )
        output = record.attend(call)
        return call.run() if output is None else (output, None)

    attend.__name__ = attend.__qualname__ = NAMES[base]
    return attend


def _wants_weights(base: str) -> bool:
    """Whether the caller collects attention probabilities, which eager attention returns and TE never has."""
    if base != "eager":
        return False
    module = sys.modules.get("transformers.utils.output_capturing")
    active: Any = getattr(module, "_active_collector", None)
    collected = None if active is None else active.get()
    return collected is not None and any("attentions" in name for name in collected)


def register() -> None:
    """Make the stand-ins known to Transformers, once, where it is loaded: attention and mask function under one name."""
    models: Any = sys.modules.get("transformers.modeling_utils")
    masks: Any = sys.modules.get("transformers.masking_utils")
    if not hasattr(models, "ALL_ATTENTION_FUNCTIONS") or not hasattr(masks, "ALL_MASK_ATTENTION_FUNCTIONS"):
        return
    for base, name in NAMES.items():
        if name not in models.ALL_ATTENTION_FUNCTIONS or name not in masks.ALL_MASK_ATTENTION_FUNCTIONS:
            models.AttentionInterface.register(name, attention_function(base))
            masks.AttentionMaskInterface.register(name, mask_function(base))


def attach(root: nn.Module, record: AttentionRecord) -> None:
    """Let an attention module ask for the stand-in, by the name in its config and in those of the models around it.

    Raises:
        ValueError: the module belongs to another fusion.
    """
    module: Any = record.owner
    module.__dict__[RECORD] = record
    if record.is_direct:
        if is_borrower(module):
            raise ValueError(f"{record.decision.scope} is part of another fusion")
        lend(module, DirectAttention, {})
        return
    exchange(root, record, module)


def exchange(root: nn.Module, record: Any, module: Any) -> None:
    """Let an attention module and the models around a fusion ask for the stand-ins; ``record.configs`` says which do now."""
    register()
    holders = [module, *_enclosing(root, record.decision)]
    for config in {id(holder.config): holder.config for holder in holders}.values():
        base = base_implementation(config._attn_implementation)
        if base in NAMES:
            config._attn_implementation_internal = NAMES[base]
            record.configs.append(config)


def _enclosing(root: nn.Module, fusion: Fusion) -> Iterator[Any]:
    """The Transformers models around a fusion: they make its masks."""
    models: Any = sys.modules["transformers.modeling_utils"]
    parts = fusion.scope.split(".") if fusion.scope else []
    for count in range(len(parts)):
        module = root.get_submodule(".".join(parts[:count]))
        if isinstance(module, models.PreTrainedModel):
            yield module


def detach(root: nn.Module, record: AttentionRecord) -> None:
    """Undo :func:`attach`; a config gets its implementation back when no other site of the model needs the stand-in."""
    record.owner.__dict__.pop(RECORD, None)
    if record.is_direct and is_borrower(record.owner):
        give_back(record.owner, {})
    exchange_back(root, record)


def exchange_back(root: nn.Module, record: Any) -> None:
    """Undo :func:`exchange`, but for configs that other sites of the model need."""
    others = [other for module in root.modules() if (other := module.__dict__.get(SITE_ATTRIBUTE)) is not None]
    for config in record.configs:
        if not any(config is needed for other in others if other is not record for needed in getattr(other, "configs", ())):
            config._attn_implementation_internal = base_implementation(config._attn_implementation)
    record.configs.clear()


register()
