"""Copies of a ``fx.GraphModule`` that holds converted modules, or whose work one of them does.

torch makes a GraphModule anew to copy or unpickle it.  It then asks for modules that are still being made, since a converted
module knows the modules around it, and keeps nothing but what the graph names: neither the module of a fusion nor the plan.
Here a copy takes every attribute over, and the graph of an unpickled one is traced from its code when it is first asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import fx, nn

from te_convert.rewrite.fused import fused_record
from te_convert.rewrite.loans import is_borrower
from te_convert.rewrite.site import is_converted

_IMPORTS = "_te_convert_imports"
"""Where an unpickled GraphModule keeps the imports that its code needs, until its graph was traced."""
_GRAPH = "_graph"


class _Copying(fx.GraphModule):
    """The methods that replace torch's; each GraphModule has a class of its own to put them on."""

    def __deepcopy__(self, memo: dict[int, Any]) -> fx.GraphModule:
        new = _blank(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy({name: value for name, value in self.__dict__.items() if name != _GRAPH}, memo))
        new.graph = copy.deepcopy(self.graph, memo)
        for hook in self._deepcopy_hooks:
            hook(new)
        return new

    def __copy__(self) -> fx.GraphModule:
        new = _blank(type(self))
        new.__dict__.update(self.__dict__)
        new.recompile()
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        assert self.graph is not None  # traced now, if it was not yet: torch takes it out of the attributes
        _, (state, imports) = fx.GraphModule.__reduce__(self)
        return _unpickled, (_written_class(type(self)), type(self).__name__), {**state, _IMPORTS: imports}

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)
        made: dict[str, Any] = {}
        exec(state[_IMPORTS] + state["_code"], made)  # as torch does: a pickle is code anyway
        type(self).forward = made["forward"]

    def __getattr__(self, name: str) -> Any:
        if name != _GRAPH or _IMPORTS not in self.__dict__:
            return super(type(self), self).__getattr__(name)
        graph = _trace(self)
        self.__dict__[_GRAPH] = graph
        del self.__dict__[_IMPORTS]
        return graph


_METHODS = ("__deepcopy__", "__copy__", "__reduce_ex__", "__setstate__", "__getattr__")


def watch_graphs(root: nn.Module) -> None:
    """Give every GraphModule of a converted model that a copy of it concerns these ways to be copied."""
    for module in _graph_modules(root):
        if any(is_converted(part) or is_borrower(part) for part in module.modules()):
            _prepare(type(module))


def unwatch_graphs(root: nn.Module) -> None:
    """Undo :func:`watch_graphs` on every GraphModule that holds nothing converted any more."""
    for module in _graph_modules(root):
        if not any(is_converted(part) or is_borrower(part) for part in module.modules()):
            for name in _METHODS:
                if vars(type(module)).get(name) is vars(_Copying)[name]:
                    delattr(type(module), name)


def _graph_modules(root: nn.Module) -> Iterator[fx.GraphModule]:
    """Those of the tree, and those that left it because a fusion stands in their place; none with ways of its own."""
    modules = list(root.modules())
    owners = [owner for record in map(fused_record, modules) if record is not None for owner in record.role("owner")]
    for module in dict.fromkeys((*modules, *owners)):
        if isinstance(module, fx.GraphModule) and _is_plain(type(module)):
            yield module


def _is_plain(cls: type[fx.GraphModule]) -> bool:
    base = _written_class(cls)
    return base.__deepcopy__ is fx.GraphModule.__deepcopy__ and base.__reduce__ is fx.GraphModule.__reduce__


def _prepare(cls: type[fx.GraphModule]) -> None:
    for name in _METHODS:
        setattr(cls, name, vars(_Copying)[name])


def _written_class(cls: type[fx.GraphModule]) -> type[fx.GraphModule]:
    """The class that somebody wrote, below the one that each instance has."""
    return next(base for base in cls.__mro__ if not base.__qualname__.endswith("GraphModuleImpl"))


def _blank(cls: type[fx.GraphModule]) -> fx.GraphModule:
    """A GraphModule without attributes, with a class of its own."""
    new: fx.GraphModule = fx.GraphModule.__new__(cls)
    type(new).__name__ = cls.__name__
    _prepare(type(new))
    return new


def _unpickled(written: type[fx.GraphModule], name: str) -> fx.GraphModule:
    new = _blank(written)
    type(new).__name__ = name
    return new


def _trace(module: fx.GraphModule) -> fx.Graph:
    """The graph of a GraphModule from its code."""
    written: Any = module.__dict__.get("_tracer_cls") or fx.Tracer

    class Leaves(written):  # type: ignore[misc]
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return True

    graph: fx.Graph = Leaves().trace(module, **module.__dict__.get("_tracer_extras", {}))
    graph._tracer_cls = written  # the class above could not be pickled
    graph.owning_module = module
    return graph
