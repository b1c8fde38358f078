"""Everything as it was, should a change of a model and its optimizer fail half-way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.rewrite.fused import FusedRecord
from te_convert.rewrite.site import SiteRecord

_CONFIG = "_attn_implementation_internal"


class _Kept:
    """An object's class and attributes; dictionaries and lists among these by content, since others may hold them too."""

    def __init__(self, held: Any) -> None:
        self.held, self.cls, self.attributes = held, type(held), dict(held.__dict__)
        self.contents = [(value, value.copy()) for value in self.attributes.values() if isinstance(value, dict | list)]

    def put_back(self) -> None:
        """Make the object what it was."""
        if type(self.held) is not self.cls:
            self.held.__class__ = self.cls
        self.held.__dict__.clear()
        self.held.__dict__.update(self.attributes)
        for value, content in self.contents:
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)


def _parts(model: nn.Module) -> Iterator[Any]:
    """Modules, also those that left the tree, and the records of conversions."""
    waiting: list[nn.Module] = list(model.modules())
    seen: set[int] = set()
    while waiting:
        module = waiting.pop()
        if id(module) in seen or isinstance(module, torch.jit.ScriptModule):
            continue
        seen.add(id(module))
        yield module
        record = module.__dict__.get(SITE_ATTRIBUTE)
        if isinstance(record, FusedRecord):
            yield record
            waiting += [part for _, member in record.members for part in member.modules()]
            waiting += list(record.scope.modules())
        elif isinstance(record, SiteRecord):
            yield record
            waiting += list(record.original.modules())


@contextmanager
def all_or_nothing(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """Put modules, records, configs and the optimizer back if the block raises.

    Values of tensors are not watched: the block may make new Parameters and must not write into those that are there.
    """
    parts = list(_parts(model))
    kept = [_Kept(part) for part in parts]
    configs = {id(config): config for part in parts for config in getattr(part, "configs", ())}
    implementations = [(config, getattr(config, _CONFIG)) for config in configs.values()]
    groups = [] if optimizer is None else [(group, dict(group)) for group in optimizer.param_groups]
    state = None if optimizer is None else optimizer.state
    try:
        yield
    except BaseException:
        for each in kept:
            each.put_back()
        for config, implementation in implementations:
            setattr(config, _CONFIG, implementation)
        for group, content in groups:
            group.clear()
            group.update(content)
        if optimizer is not None and state is not None:
            optimizer.state = state
        raise
