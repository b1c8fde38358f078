"""Move the state of an optimizer from the parameters of a model to those of its conversion, and back.

A fused parameter holds several original ones, so what an optimizer keeps for them (moments, momenta) is joined by the same weight
program as the weights were.  Everything is computed before anything is changed.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from te_convert.errors import InputError
from te_convert.rewrite.fused import fused_record
from te_convert.rewrite.loans import holder_of
from te_convert.rewrite.site import get_record, is_converted
from te_convert.weights.ops import Fill, Move, WeightOp, gather

Change = Callable[[list[torch.Tensor]], torch.Tensor]
"""State tensors of the old parameters → state tensor of the new one."""


@dataclass(frozen=True)
class Origins:
    """Where the parameters of a model were before its conversion; keeps none of them alive.

    Attributes:
        parameters: name → the Parameter object, for every name of a tied one.
        kept: names of parameters that an earlier conversion already put into TE's layout.
    """

    parameters: dict[str, weakref.ref[nn.Parameter]] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()

    def __reduce__(self) -> Any:
        """A pickled or copied one knows nothing: the objects are not the same ones there."""
        return Origins, ()


def record_origins(model: nn.Module) -> Origins:
    """Remember by name the Parameter objects that ``model`` has now."""
    found = {name: weakref.ref(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    done = [name for name, module in model.named_modules(remove_duplicate=False) if is_converted(module)]
    kept = frozenset(_join(name, key) for name in done for key, _ in model.get_submodule(name).named_parameters(recurse=False))
    return Origins(found, kept)


@dataclass(frozen=True)
class Link:
    """One parameter of the new model and the old ones that it is made of; ``names`` are the old ones' names."""

    names: tuple[str, ...]
    olds: tuple[nn.Parameter, ...]
    new_name: str
    new: nn.Parameter
    change: Change | None  # None: the layout is the same


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _conversions(model: nn.Module) -> Iterator[tuple[str, str, WeightOp, nn.Parameter]]:
    """(prefix of the sources, name, operation, parameter) for every parameter that a converted module holds."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for fqn, module in model.named_modules():
        if not is_converted(module):
            continue
        record = fused_record(module)
        weights = get_record(module).decision.weights
        for op in () if weights is None else weights.ops:
            holder, name = holder_of(module, op.dest)
            parameter = holder._parameters[name]
            if not isinstance(op, Fill) and parameter is not None:
                yield (fqn if record is None else record.decision.scope), names[id(parameter)], op, parameter


def links_forward(origins: Origins, model: nn.Module) -> list[Link]:
    """Original parameters → those of the converted ``model``."""
    alive = {name: parameter for name, ref in origins.parameters.items() if (parameter := ref()) is not None}
    links: list[Link] = []
    used: set[str] = set()
    for prefix, name, op, new in _conversions(model):
        sources = tuple(_join(prefix, source) for source in op.sources)
        if name in origins.kept or not all(source in alive for source in sources):
            continue
        used.update(sources)
        change = None if isinstance(op, Move) else op.forward
        links.append(Link(sources, tuple(alive[s] for s in sources), name, new, change))
    for name, new in model.named_parameters(remove_duplicate=False):
        if name in alive and name not in used:
            links.append(Link((name,), (alive[name],), name, new, None))
    return _in_order(links, model)


def plan_back(model: nn.Module) -> Callable[[nn.Module], list[Link]]:
    """Read a converted model before it is reverted; the result makes the links once the original modules are back."""
    pieces: dict[str, list[tuple[WeightOp, int, str, nn.Parameter]]] = defaultdict(list)
    for prefix, name, op, old in _conversions(model):
        for index, source in enumerate(op.sources):
            pieces[_join(prefix, source)].append((op, index, name, old))

    def make(original: nn.Module) -> list[Link]:
        links = []
        for source, parts in pieces.items():
            change = None if isinstance(parts[0][0], Move) else _restorer([(op, index) for op, index, *_ in parts])
            names, olds = tuple(name for _, _, name, _ in parts), tuple(old for *_, old in parts)
            links.append(Link(names, olds, source, original.get_parameter(source), change))
        found = {id(link.new) for link in links}
        for name, parameter in original.named_parameters():
            if id(parameter) not in found:
                links.append(Link((name,), (parameter,), name, parameter, None))
        return _in_order(links, original)

    return make


def _in_order(links: list[Link], model: nn.Module) -> list[Link]:
    """The links in the order of the new model's parameters."""
    order = {id(parameter): index for index, parameter in enumerate(model.parameters())}
    return sorted(links, key=lambda link: order[id(link.new)])


def _restorer(parts: Sequence[tuple[WeightOp, int]]) -> Change:
    def change(tensors: list[torch.Tensor]) -> torch.Tensor:
        return gather([op for op, _ in parts], [op.part(t, i) for (op, i), t in zip(parts, tensors, strict=True)])

    return change


def follow_conversion(optimizer: torch.optim.Optimizer, origins: Origins, model: nn.Module, inplace: bool) -> torch.optim.Optimizer:
    """Move an optimizer of the parameters in ``origins`` to those of the converted ``model``.

    Raises:
        InputError: it has none of them, or :func:`move_optimizer` cannot move it.
    """
    links = links_forward(origins, model)
    known = {id(old) for link in links for old in link.olds}
    if not any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"]):
        raise InputError(
            "the optimizer has no parameter of the model that was converted",
            "pass the optimizer of the model that was given to convert(), and the result that this call returned",
        )
    return move_optimizer(optimizer, links, inplace)


def move_optimizer(optimizer: torch.optim.Optimizer, links: Sequence[Link], inplace: bool) -> torch.optim.Optimizer:
    """An optimizer of the new parameters with the state, groups and settings of ``optimizer``.

    Parameters that no link names stay, ahead of the others.  Those come in the order of the links, which is that of the new model:
    an optimizer that is made for it later numbers them alike, and takes the moved one's ``state_dict()``.

    Raises:
        InputError: several parameters became one, and the optimizer treats them differently; or their state cannot be joined.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError("LBFGS keeps one history of all parameters together, which cannot be moved", "make a new optimizer")
    place = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    used: list[Link] = []
    states: dict[int, dict[str, Any]] = {}
    for link in links:
        if any(id(old) in place for old in link.olds):
            _check_groups(link, optimizer.param_groups, place)
            used.append(link)
            if id(link.new) not in states:
                states[id(link.new)] = _state(link, [optimizer.state.get(old, {}) for old in link.olds], inplace)
    gone = {id(old) for link in used for old in link.olds}
    groups = [_group(group, used, gone) for group in optimizer.param_groups]
    state: dict[nn.Parameter, Any] = defaultdict(dict)
    for group, before in zip(groups, optimizer.param_groups, strict=True):
        state.update({p: optimizer.state[p] for p in before["params"] if id(p) not in gone and p in optimizer.state})
        state.update({p: states[id(p)] for p in group["params"] if states.get(id(p))})
    moved = optimizer if inplace else _copy(optimizer)
    if inplace:  # the groups' dictionaries are what schedulers hold
        for group, changed in zip(moved.param_groups, groups, strict=True):
            group.update(changed)
    else:
        moved.param_groups = groups
    moved.state = state  # type: ignore[assignment]  # torch's stub wants a defaultdict of tensors
    return moved


def _check_groups(link: Link, groups: list[dict[str, Any]], place: dict[int, int]) -> None:
    absent = [name for name, old in zip(link.names, link.olds, strict=True) if id(old) not in place]
    if absent:
        raise InputError(
            f"{', '.join(link.names)} became {link.new_name}, but {', '.join(absent)} is not in the optimizer",
            "give all of them to the optimizer or none, or exclude these modules from the conversion",
        )
    settings = [{k: v for k, v in groups[place[id(old)]].items() if k not in ("params", "param_names")} for old in link.olds]
    for name, other in zip(link.names[1:], settings[1:], strict=True):
        different = sorted(key for key in {*settings[0], *other} if not _same(settings[0].get(key), other.get(key)))
        if different:
            raise InputError(
                f"{link.names[0]} and {name} became one parameter ({link.new_name}), "
                f"but their param groups differ in {', '.join(different)}",
                "give them the same settings, or exclude these modules from the conversion",
            )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and bool(torch.equal(one, other))
    return bool(one == other)


def _state(link: Link, states: list[dict[str, Any]], inplace: bool) -> dict[str, Any]:
    """What the optimizer keeps for the new parameter; tensors of their own unless the old optimizer is given up."""
    if any(state.keys() != states[0].keys() for state in states):
        raise InputError(
            f"{', '.join(link.names)} became {link.new_name}, but only some of them were stepped by the optimizer",
            "take a step in which all of them have gradients, or exclude these modules from the conversion",
        )
    found: dict[str, Any] = {}
    for key in states[0]:
        values = [state[key] for state in states]
        if link.change is None:
            found[key] = values[0].clone() if isinstance(values[0], torch.Tensor) and not inplace else values[0]
        elif all(isinstance(v, torch.Tensor) and v.shape == old.shape for v, old in zip(values, link.olds, strict=True)):
            found[key] = link.change(values).contiguous().clone()
        elif all(_is_one_number(value) and _same(value, values[0]) for value in values):
            found[key] = values[0].clone() if isinstance(values[0], torch.Tensor) else values[0]
        else:
            raise InputError(
                f"the optimizer's {key!r} of {', '.join(link.names)} cannot become that of {link.new_name}: "
                "it has not the parameters' shape, and is not one equal number",
                "convert with fuse=False, or make a new optimizer",
            )
    return found


def _is_one_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _group(group: dict[str, Any], links: Sequence[Link], gone: set[int]) -> dict[str, Any]:
    """The group with its new parameters, each once, after those of no link."""
    named = group.get("param_names", [""] * len(group["params"]))
    here = {id(old) for old in group["params"]}
    other = [(old, name) for old, name in zip(group["params"], named, strict=True) if id(old) not in gone]
    new = {id(link.new): (link.new, link.new_name) for link in links if id(link.olds[0]) in here}
    pairs = [*other, *new.values()]
    changed = {**group, "params": [parameter for parameter, _ in pairs]}
    if "param_names" in group:
        changed["param_names"] = [name for _, name in pairs]
    return changed


def _copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimizer as another object; a scheduler's wrapper around the old one's ``step`` is left behind."""
    copied = object.__new__(type(optimizer))
    own = {name: value for name, value in optimizer.__dict__.items() if name != "step"}
    copied.__dict__.update({name: value.copy() if isinstance(value, dict) else value for name, value in own.items()})
    return copied
