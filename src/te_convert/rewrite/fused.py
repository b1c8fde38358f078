"""Run-time side of a fusion: which fused module a member belongs to, when it may run, and how often it did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from te_convert.match.fusion import Fusion
from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.replacements.parallel import Parallel
from te_convert.rewrite.carry_over import find_hooks, remove_hook
from te_convert.rewrite.lazy import LazyNorm, can_defer, saving, unwrap, versions_of
from te_convert.rewrite.lazy_scores import LazyScores, unwrap_scores
from te_convert.rewrite.loans import Borrower
from te_convert.rewrite.shared import SharedInput, can_share

ROWS = "_te_convert_rows"
"""Where a reader keeps the number of its columns."""
PARTS = frozenset({"gate", "up", "fc1", "fc2", "inside", "dropout-inside", "part"})
"""Roles of the modules that do not run when a whole MLP or block does."""
RECORDS = "_te_convert_records"
"""Where a norm keeps the records of the fusions that read it, and a Linear that of its fusion."""

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one run of a fusion, as the original takes them."""
Observer = Callable[["FusedRecord", Inputs, torch.Tensor], None]


@dataclass(eq=False)
class FusedRecord:
    """What a fused module knows about itself.

    Attributes:
        decision: the fusion that the plan asked for.
        module: the TE module (or its twin) that holds the parameters.
        scope: the module that holds all members.
        members: (role, module) of the modules that it stands for, in the order in which they run.
        enabled: False runs the members' own forwards.
        own: the original Parameters, by source name, served to the members instead of the fused ones for the time being.
        executed: how often the TE module ran.
        fallbacks: how often a member ran its original forward instead.
        observer: called with (record, inputs, output) whenever the TE module ran.
        own_children: names of the TE module's children that are not the owner's.
        owner_children: the owner's own dictionary of children, while it shares the TE module's.
        apart: original vectors whose memory the TE module does not share, by source name; a perturbation has to reach them too.
        shared: for a fusion without a norm, what waits for its readers.
        switches: (module, attribute, old value) changed so that the members run at all; undone with the fusion.
        parallel: which part of the module this rank has; None for all of it.
        cuts: parameter → (dimension, segments) of those that are divided.
        whole: ``decision`` before the module was divided.
    """

    decision: Fusion
    module: nn.Module
    scope: nn.Module
    backend: str
    members: tuple[tuple[str, nn.Module], ...] = ()
    enabled: bool = True
    own: Mapping[str, nn.Parameter] | None = None
    executed: int = 0
    fallbacks: int = 0
    observer: Observer | None = None
    own_children: tuple[str, ...] = ()
    owner_children: dict[str, nn.Module | None] | None = None
    apart: dict[str, nn.Parameter] = field(default_factory=dict)
    shared: SharedInput = field(default_factory=SharedInput)
    switches: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    parallel: Parallel | None = None
    cuts: dict[str, Any] = field(default_factory=dict)
    whole: Fusion | None = None

    def role(self, role: str) -> list[nn.Module]:
        """The members with a role."""
        return [module for name, module in self.members if name == role]

    @cached_property
    def norm(self) -> Any:
        """The norm, or None for a fusion without one."""
        return next(iter(self.role("norm")), None)

    @cached_property
    def readers(self) -> list[nn.Module]:
        """The Linears that take columns of the output, in their order."""
        return self.role("linear")

    @cached_property
    def _parts(self) -> list[tuple[list[str], nn.Module]]:
        """The owner's parts that do not run when the TE module does, with their places in it."""
        prefix = f"{self.decision.member('owner')}."
        pairs = zip(self.decision.members, self.members, strict=True)
        return [(m.fqn.removeprefix(prefix).split("."), module) for m, (role, module) in pairs if role in PARTS]

    def intact(self) -> bool:
        """False when somebody replaced a part of the owner, or hooked one, after the conversion."""
        for path, part in self._parts:
            found: Any = self.module
            for name in path:
                found = found._modules.get(name) if found is not None else None
            if found is not part:
                return False
            if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
                return False
        return True

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """The TE module on its input, counted and observed."""
        module: Any = self.module
        y: torch.Tensor = module.run_te(x)
        self.ran(((x,), {}), y)
        return y

    def ran(self, inputs: Inputs, y: torch.Tensor) -> None:
        """Count a run of the TE module and show it to the observer."""
        self.executed += 1
        if self.observer is not None:
            self.observer(self, inputs, y)

    def run_again(self, inputs: Inputs) -> torch.Tensor:
        """The TE module once more on the same inputs, uncounted."""
        module: Any = self.module
        again = module.run_again if hasattr(type(module), "run_again") else module.te_forward
        y: torch.Tensor = again(*inputs[0], **inputs[1])
        return y

    def sample_inputs(self) -> Inputs | None:
        """Random inputs for a site that no run reached; None for the usual single tensor."""
        return None

    def run_original(self, inputs: Inputs, own: Mapping[str, nn.Parameter] | None = None) -> torch.Tensor:
        """The members' own forwards on the fused module's inputs, one after the other; with ``own`` Parameters if given."""
        with self.off(own):
            experts: list[Any] = self.role("experts")
            if experts:
                y: torch.Tensor = experts[0].eager(*inputs[0], **inputs[1])
                return y
            if self.norm is None and self.role("owner"):
                return self._run_owner(*inputs[0], **inputs[1])
            (x,) = inputs[0]
            h = x if self.norm is None else self.norm.eager(x)
            if self.role("owner"):
                return self._run_owner(h)
            readers: list[Any] = self.role("linear")
            return torch.cat([reader.eager(h) for reader in readers], -1)

    def _run_owner(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The owner's own forward without dropouts, which the TE module does not have either; the first of several results."""
        (owner,) = self.role("owner")
        owner.training = self.module.training  # it is no part of the tree
        dropouts = [module for module in (*self.role("dropout-inside"), *self.role("dropout-after")) if module.training]
        try:
            for module in dropouts:
                module.training = False
            y = type(owner).forward(owner, *args, **kwargs)
        finally:
            for module in dropouts:
                module.training = True
        first: torch.Tensor = y[0] if isinstance(y, tuple) else y
        return first

    @contextmanager
    def off(self, own: Mapping[str, nn.Parameter] | None = None) -> Iterator[None]:
        """The members as they were before the fusion, for the time being."""
        before = (self.enabled, self.own)
        self.enabled, self.own = False, own if own is not None else self.own
        try:
            yield
        finally:
            self.enabled, self.own = before

    def __deepcopy__(self, memo: Any) -> FusedRecord:
        """A record of the copied model: counters at zero, nothing observed."""
        import copy

        new = FusedRecord(self.decision, nn.Module(), nn.Module(), self.backend, enabled=self.enabled)
        memo[id(self)] = new
        new.module = copy.deepcopy(self.module, memo)
        new.scope = copy.deepcopy(self.scope, memo)
        new.members = copy.deepcopy(self.members, memo)
        new.own_children, new.owner_children = self.own_children, copy.deepcopy(self.owner_children, memo)
        new.switches = copy.deepcopy(self.switches, memo)
        new.parallel, new.cuts, new.whole = self.parallel, self.cuts, self.whole
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Nothing of a run that is under way."""
        return {**self.__dict__, "observer": None, "own": None, "shared": SharedInput(), "apart": {}, "executed": 0, "fallbacks": 0}


def fused_record(module: nn.Module) -> FusedRecord | None:
    """The record of a fused TE module, or None."""
    record = module.__dict__.get(SITE_ATTRIBUTE)
    return record if isinstance(record, FusedRecord) else None


def get_fused(module: nn.Module) -> FusedRecord:
    """The record of a fused TE module.

    Raises:
        KeyError: the module is not one.
    """
    record = fused_record(module)
    if record is None:
        raise KeyError(type(module).__name__)
    return record


def attribute_of_owner(site: nn.Module, name: str) -> Any:
    """``nn.Module.__getattr__``, then the attribute of the module that the site stands for.

    Raises:
        AttributeError: neither has it.
    """
    try:
        return nn.Module.__getattr__(site, name)
    except AttributeError:
        record = fused_record(site)
        if record is None or name.startswith("__") or not record.role("owner"):
            raise
        return getattr(record.role("owner")[0], name)


def unwrap_output(module: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook of a converted root: nobody outside gets a lazy tensor."""
    leaves = tree_leaves(output)
    for leaf in leaves:
        if is_dataclass(leaf):  # of a class that torch does not look into
            for name, value in vars(leaf).items():
                found = unwrap_output(module, args, value)
                if found is not None:
                    object.__setattr__(leaf, name, found)
    return tree_map(_unwrap, output) if any(type(leaf) in (LazyNorm, LazyScores) for leaf in leaves) else None


def _unwrap(value: Any) -> Any:
    return unwrap_scores(unwrap(value))


def watch_root(root: nn.Module) -> None:
    """Unwrap what a root with fused norms returns."""
    if any(map(fused_record, root.modules())) and not find_hooks(root._forward_hooks, unwrap_output):
        root.register_forward_hook(unwrap_output)


def unwatch_root(root: nn.Module) -> None:
    """Undo :func:`watch_root` on a root without fusions."""
    if not any(map(fused_record, root.modules())):
        remove_hook(root._forward_hooks, unwrap_output)


class DeferringNorm(Borrower):
    """A norm that leaves its work to the fused modules that read it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A lazy tensor where it may be one, else the original's output."""
        if len(args) == 1 and not kwargs:
            x = args[0]
            if type(x) is LazyNorm:
                x = x.pending.value()
            if can_defer(x) and any(record.enabled for record in self.__dict__[RECORDS]):
                return LazyNorm.defer(self, x)
        return self.eager(*args, **kwargs)

    def output_dtype(self, x: torch.Tensor) -> torch.dtype:
        """dtype that the original returns, found out once per input dtype and autocast mode."""
        device = x.device.type
        key = (x.dtype, torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None)
        known: dict[Any, torch.dtype] = self.__dict__.setdefault("_te_convert_dtypes", {})
        if key not in known:
            with torch.no_grad():
                known[key] = self.eager(x.detach().reshape(-1, x.shape[-1])[:1].clone()).dtype
        return known[key]


class FusedReader(Borrower):
    """A Linear that takes its part of what the fused module computed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Its columns of the fused output for the fusion's own lazy input, else the original forward."""
        record: FusedRecord = self.__dict__[RECORDS]
        x = args[0] if args else next(iter(kwargs.values()), None)
        if len(args) + len(kwargs) == 1 and record.enabled:
            y = _take(record, self, x) if type(x) is LazyNorm else _take_shared(record, self, x)
            if y is not None:
                return y
        if record.enabled:
            record.fallbacks += 1
        return self.eager(*args, **kwargs)


_NOTHING: tuple[Any, dict[int, torch.Tensor]] = (None, {})


def _circumstances(record: FusedRecord) -> tuple[Any, ...]:
    """What has to be the same for columns to be taken: no weight changed in place, no checkpoint entered, left or replayed."""
    return saving(), versions_of([parameter for parameter in record.module._parameters.values() if parameter is not None])


def _take(record: FusedRecord, reader: nn.Module, lazy: LazyNorm) -> torch.Tensor | None:
    """One reader's columns.  The first reader runs the fused module and leaves the others' columns on the lazy tensor.

    None when the lazy tensor is not of this fusion's norm, the reader took its part already, or the norm's value has to be used.
    """
    pending = lazy.pending
    if pending.norm is not record.norm:
        return None
    if len(record.readers) == 1:
        x = pending.raw()
        return None if x is None else record.run(x)
    left, waiting = pending.stash.get(id(record), _NOTHING)
    now = _circumstances(record)
    if not waiting or left != now:
        x = pending.raw()
        if x is None:
            return None
        waiting = _columns(record, record.run(x))
        pending.stash[id(record)] = now, waiting
    elif not pending.may_fuse():
        return None
    y = waiting.pop(id(reader), None)
    if not waiting:
        del pending.stash[id(record)]  # a replay with the same lazy tensor (checkpoint) starts afresh
    return y


def _take_shared(record: FusedRecord, reader: nn.Module, x: Any) -> torch.Tensor | None:
    """One reader's columns for an input that is no norm's; None for a fusion with a norm, which this input did not come from."""
    if record.norm is not None or not can_share(x):
        return None
    now = _circumstances(record)
    y = record.shared.take(id(reader), x, now)
    if y is None:
        columns = _columns(record, record.run(x))
        y = columns.pop(id(reader))
        record.shared.leave(x, now, columns)
    return y


def _columns(record: FusedRecord, y: torch.Tensor) -> dict[int, torch.Tensor]:
    """id(reader) → its part of the fused output [..., out_features]."""
    parts, start = {}, 0
    for reader in record.readers:
        size = reader.__dict__[ROWS]
        part = y.narrow(-1, start, size)  # not split, whose results must not be changed in place
        parts[id(reader)] = part.contiguous() if record.decision.contiguous else part
        start += size
    return parts
