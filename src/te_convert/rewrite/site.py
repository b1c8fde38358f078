"""Converted modules: a TE module (or its twin) with the manners of the module it replaced.

What is added to TE's class: the call conventions of nn.Linear and of norm modules (1-D inputs, keyword names), a state dict
without TE's empty ``_extra_state``, and loading of checkpoints in the original layout as well as in TE's.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from te_convert.match.groups import inside
from te_convert.plan.model import SITE_ATTRIBUTE, Decision
from te_convert.reference.emulation import active as emulated
from te_convert.reference.emulation import high_precision
from te_convert.replacements.build import module_class
from te_convert.replacements.parallel import Parallel
from te_convert.replacements.recipes import rows_multiple
from te_convert.replacements.specs import (
    DotProductAttentionSpec,
    GroupedExpertsSpec,
    LayerNormLinearSpec,
    LayerNormMLPSpec,
    LinearSpec,
    MultiheadAttentionSpec,
    Spec,
    TransformerLayerSpec,
)
from te_convert.rewrite.blocks import translate_call
from te_convert.rewrite.fused import attribute_of_owner, fused_record, get_fused
from te_convert.rewrite.lazy import LazyNorm, unwrap
from te_convert.rewrite.loans import in_original_layout, save_loans
from te_convert.rewrite.portable import Portable
from te_convert.rewrite.rows import PADDED, run_padded
from te_convert.rewrite.state_keys import EXTRA_STATE, drop_empty_extra_state, take_part
from te_convert.weights.ops import Fill, Move, Transpose, WeightMap

LAYOUT_KEY = "te_convert_layout"


@dataclass
class SiteRecord:
    """What a converted module knows about itself.

    Attributes:
        decision: why and how it was converted.
        original: the module that it replaced, without its Parameters (they live in the converted module).
        incoming: layout ("te" or "original") of the state dict being loaded, told by the root's load hook; square weights
            cannot show it themselves.
        switches: (module, attribute, old value) changed so that the site runs at all; undone with it.
        parallel: which part of the module this rank has; None for all of it.
        cuts: parameter → (dimension, segments) of those that are divided.
    """

    decision: Decision
    original: nn.Module
    backend: str
    incoming: str | None = None
    switches: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    parallel: Parallel | None = None
    cuts: dict[str, Any] = field(default_factory=dict)


def get_record(module: nn.Module) -> SiteRecord:
    """The record of a converted module.

    Raises:
        KeyError: the module was not converted.
    """
    record: SiteRecord = module.__dict__[SITE_ATTRIBUTE]
    return record


def is_converted(module: nn.Module) -> bool:
    """True for a module that this package put in place."""
    return SITE_ATTRIBUTE in module.__dict__


class Delegate:
    """Stands in for the original's ``forward``: code that still holds the original module runs the converted one."""

    def __init__(self, converted: nn.Module) -> None:
        self.converted = converted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the converted module's forward, whatever it is now."""
        return self.converted.forward(*args, **kwargs)


class TEState(Portable):
    """Mixin in front of a TE module or a twin: the manners of its state dict, and the precision that the plan gives it."""

    def _precision(self) -> Any:
        """Leave the recipe's autocast, or on twins its emulation, where the plan says that the recipe is not used."""
        record = get_record(self)
        if record.decision.precision != "high":
            return nullcontext()
        if record.backend != "te":
            return high_precision()
        import transformer_engine.pytorch as te

        return te.autocast(enabled=False) if hasattr(te, "autocast") else te.fp8_autocast(enabled=False)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        fused = fused_record(self)
        if in_original_layout() and fused is not None:  # its members write the parameters; an owner is no child of its own
            for owner in fused.role("owner"):
                save_loans(owner, destination, prefix, keep_vars)
            return
        super()._save_to_state_dict(destination, prefix, keep_vars)
        drop_empty_extra_state(destination, prefix)
        for op in _weights(self).ops:
            if isinstance(op, Fill):
                destination.pop(prefix + op.dest, None)
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None and prefix[:-1] in metadata:
            metadata[prefix[:-1]][LAYOUT_KEY] = "te"

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        problem = None if fused_record(self) is not None else _to_te_layout(self, state_dict, prefix, local_metadata)
        if problem is not None:
            error_msgs.append(problem)
            return
        take_part(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        forgiven = {prefix + EXTRA_STATE} | {prefix + op.dest for op in _weights(self).ops if isinstance(op, Fill)}
        missing_keys[:] = [key for key in missing_keys if key not in forgiven]


class Site(TEState):
    """One tensor in, one tensor out.

    ``padded`` classes, those of TE with quantised products, take any number of rows (rewrite/rows.py).
    """

    padded = False

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """Run on the single tensor given, whatever its keyword was called in the original."""
        (x,) = (*inputs, *named.values())
        return self.te_forward(x)

    def te_forward(self, x: torch.Tensor) -> torch.Tensor:
        """TE's own forward, in the precision of the plan."""
        y: torch.Tensor
        if emulated() is None and self.__dict__[SITE_ATTRIBUTE].backend == "reference":
            y = super().forward(x)
            return y
        with self._precision():
            y = run_padded(super().forward, x) if type(self).padded else super().forward(x)
        return y

    def run_te(self, x: torch.Tensor) -> torch.Tensor:
        """What a fusion does to run this module: call it, hooks and all."""
        y: torch.Tensor = self(x)
        return y


class LinearSite(Site):
    """Adds nn.Linear's treatment of 1-D inputs, which TE returns as [1, out_features]."""

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """Input [..., in_features] → output [..., out_features], also for a 1-D input."""
        (x,) = (*inputs, *named.values())
        if x.dim() == 1:
            return self.te_forward(x.unsqueeze(0)).squeeze(0)
        return self.te_forward(x)


class MLPSite(Site):
    """Takes the place of the module that owned an MLP; the MLP's parts stay its children and run where the fusion may not."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The fused MLP for its norm's lazy output, else the original forward."""
        record = fused_record(self)
        assert record is not None  # an MLPSite is made by a fusion
        if len(args) == 1 and not kwargs and type(args[0]) is LazyNorm and record.enabled and not self._draws_inside(record):
            pending = args[0].pending
            x = pending.raw() if pending.norm is record.norm and record.intact() else None
            if x is not None:
                y = record.run(x)
                for dropout in record.role("dropout-after"):
                    y = dropout(y)
                return y
        if record.enabled:
            record.fallbacks += 1
        return self._eager(record, *args, **kwargs)

    def run_te(self, x: torch.Tensor) -> torch.Tensor:
        """TE's forward alone: the hooks on this module are those of the MLP, which takes the normalised input."""
        return self.te_forward(x)

    def __getattr__(self, name: str) -> Any:
        """What the TE module lacks and the original has: its methods and properties."""
        return attribute_of_owner(self, name)

    def _eager(self, record: Any, *args: Any, **kwargs: Any) -> Any:
        original = record.role("owner")[0]
        original.training = self.training
        values = {name: unwrap(value) for name, value in kwargs.items()}
        return type(original).forward(original, *map(unwrap, args), **values)

    def _draws_inside(self, record: Any) -> bool:
        """A dropout between the two Linears is active: TE's MLP has none."""
        return any(module.training and module.p > 0 for module in record.role("dropout-inside"))


def _weights(module: nn.Module) -> WeightMap:
    weights = get_record(module).decision.weights
    assert weights is not None  # a converted site has a weight map
    return weights


def _to_te_layout(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> str | None:
    """Rewrite this module's entries of a state dict to TE's names and layout; an error text when the layout is ambiguous."""
    is_te = metadata.get(LAYOUT_KEY) == "te"
    for op in _weights(module).ops:
        if isinstance(op, Move) and op.source != op.dest and prefix + op.source in state_dict:
            state_dict[prefix + op.dest] = state_dict.pop(prefix + op.source)
        if not isinstance(op, Transpose) or prefix + op.source not in state_dict or is_te:
            continue
        tensor = state_dict[prefix + op.source]
        layout = _layout_of(module, op, tensor)
        if layout is None:
            return (
                f"{prefix}{op.source}: a square weight does not show whether it is in the original or in TE's layout; "
                "use te_convert.load_original_state_dict for the original layout"
            )
        if layout == "original":
            state_dict.pop(prefix + op.source)
            state_dict[prefix + op.dest] = tensor.t().contiguous()
    return None


def _layout_of(module: nn.Module, op: Transpose, tensor: torch.Tensor) -> str | None:
    """Layout "te" or "original", from the shape, else from what the root's hook saw in the whole state dict; None when unknown."""
    own = tuple(getattr(module, op.dest).shape)
    if own[0] != own[1]:
        return "te" if tuple(tensor.shape) == own else "original"
    return get_record(module).incoming


def tell_layout(root: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load hook of a converted root: let the shapes of non-square transposed weights speak for the square ones."""
    square: list[SiteRecord] = []
    seen: str | None = None
    for name, module in root.named_modules():
        seen = seen or layout_of_fusion(name, module, state_dict, prefix)
        for op in _weights(module).ops if has_transposed(module) else ():
            if isinstance(op, Transpose):
                own = tuple(getattr(module, op.dest).shape)
                tensor = state_dict.get(f"{prefix}{name}.{op.source}")
                if own[0] == own[1]:
                    square.append(get_record(module))
                elif tensor is not None:
                    seen = "te" if tuple(tensor.shape) == own else "original"
    for record in square:
        record.incoming = seen


def layout_of_fusion(name: str, module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> str | None:
    """Layout of a fused module's entries in a state dict; their names show it.  None for any other module or without entries."""
    record = fused_record(module)
    if record is None:
        return None
    inner = inside(record.decision.fqn, record.decision.scope)
    outer = prefix + name.removesuffix(inner)
    for op in record.decision.weights.ops:
        if op.sources and outer + op.sources[0] in state_dict:
            return "original"
        if f"{prefix}{name}.{op.dest}" in state_dict:
            return "te"
    return None


def forget_layout(root: nn.Module, _: Any) -> None:
    """Load hook of a converted root: what :func:`tell_layout` saw holds for one load only."""
    for module in root.modules():
        if has_transposed(module):
            get_record(module).incoming = None


def has_transposed(module: nn.Module) -> bool:
    """True for a module that replaced one other and whose weight is stored in another layout than the original's."""
    swapped = is_converted(module) and fused_record(module) is None
    return swapped and any(isinstance(op, Transpose) for op in _weights(module).ops)


class BlockSite(TEState):
    """Takes the place of a whole module, whose parts stay its children and run where TE cannot express the call."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the original."""
        record = get_fused(self)
        call = translate_call(record, args, kwargs) if record.enabled else None
        if call is None:
            record.fallbacks += record.enabled
            owner = record.role("owner")[0]
            owner.training = self.training
            return type(owner).forward(owner, *args, **kwargs)
        y = self.te_forward(*call.args, **call.kwargs)
        record.ran((args, kwargs), y)
        return (y, None) if call.pair else y

    def te_forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TE's own forward, in the precision of the plan."""
        with self._precision():
            y: torch.Tensor = super().forward(*args, **kwargs)
        return y

    def run_again(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The TE module for a call of the original, uncounted."""
        call = translate_call(get_fused(self), args, kwargs)
        assert call is not None  # it ran before
        return self.te_forward(*call.args, **call.kwargs)

    def __getattr__(self, name: str) -> Any:
        """What the TE module lacks and the original has: its attributes, methods and properties."""
        return attribute_of_owner(self, name)


class ExpertsSite(TEState):
    """Tokens, expert indices and weights in, tokens out."""

    def te_forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The grouped forward, in the precision of the plan."""
        with self._precision():
            record, experts = get_fused(self), self.__dict__
            spec: Any = record.decision.spec
            if record.backend == "te":
                experts["row_multiple"] = max(spec.row_multiple, rows_multiple(grouped=True))
            y: torch.Tensor = super().forward(*tensors)
        return y


_CLASSES: dict[tuple[str, str], type[TEState]] = {}
_MIXINS: dict[type[Spec], type[TEState]] = {
    LinearSpec: LinearSite,
    LayerNormLinearSpec: LinearSite,
    LayerNormMLPSpec: MLPSite,
    DotProductAttentionSpec: TEState,
    GroupedExpertsSpec: ExpertsSite,
    MultiheadAttentionSpec: BlockSite,
    TransformerLayerSpec: BlockSite,
}


def site_class(spec: Spec, backend: str) -> type[TEState]:
    """The converted class of a spec: ``ReferenceLinear`` on twins, ``TELinear`` on Transformer Engine.

    Made once per class and registered in this module, so that whole models pickle and deepcopy.

    Raises:
        EnvironmentLacksError: backend "te" and it does not import.
    """
    base = module_class(spec, backend)
    short = spec.name.removeprefix("te.")
    name = f"{'TE' if backend == 'te' else 'Reference'}{short}"
    key = (backend, short)
    if key not in _CLASSES:
        mixin = _MIXINS.get(type(spec), Site)
        body = {"__module__": __name__, "__doc__": f"{spec.name} in the place of a PyTorch module."}
        cls = type(name, (mixin, base), body | ({"padded": True} if backend == "te" and short in PADDED else {}))
        _CLASSES[key] = cls
        globals()[name] = cls
    return _CLASSES[key]


def __getattr__(name: str) -> Any:
    """Unpickling asks for a class that this process may not have made yet."""
    from te_convert.replacements.specs import SPECS

    for prefix, backend in (("Reference", "reference"), ("TE", "te")):
        spec_class = SPECS.get(f"te.{name.removeprefix(prefix)}") if name.startswith(prefix) else None
        if spec_class is not None:
            blank: Any = object.__new__(spec_class)
            return site_class(blank, backend)
    raise AttributeError(name)
