"""Who reads a module's output, in every recorded call, looking through operations that change nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import fx, nn

from te_convert.capture.graph import Capture, Recording, place_of

_CASTS = frozenset({"to", "float", "type", "type_as", "contiguous", "bfloat16", "half"})
_VIEWS = frozenset({"view", "reshape"})


@dataclass(frozen=True)
class Readers:
    """The readers of one module's output.

    Attributes:
        linears: names of the Linears, in the order in which they run.
        others: what else reads it, one phrase each.
        problem: why the recorded calls cannot be described by one list, or "".
        contiguous: Linears whose output is viewed so that it has to be contiguous.
    """

    linears: tuple[str, ...]
    others: tuple[str, ...] = ()
    problem: str = ""
    contiguous: frozenset[str] = frozenset()


def node_name(node: fx.Node) -> str:
    """``add``, ``softmax`` or a module's name."""
    return str(node.target) if node.op in ("call_module", "call_method") else str(getattr(node.target, "__name__", node.target))


def _shape(node: fx.Node) -> tuple[int, ...]:
    meta = node.meta.get("tensor_meta")
    return () if meta is None else tuple(meta.shape)


def _dtype(node: fx.Node) -> torch.dtype | None:
    meta = node.meta.get("tensor_meta")
    return None if meta is None else meta.dtype


def is_dropout(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """A dropout, as a module or as a function."""
    return isinstance(modules.get(str(node.target)), nn.Dropout) if node.op == "call_module" else node_name(node) == "dropout"


def dropout_p(node: fx.Node, modules: dict[str, nn.Module]) -> float:
    """The probability of a dropout node."""
    if node.op == "call_module":
        return float(modules[str(node.target)].p)  # type: ignore[arg-type]
    value = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
    return float(value) if isinstance(value, (int, float)) else 1.0


def _is_idle_dropout(node: fx.Node, modules: dict[str, nn.Module], training: bool) -> bool:
    if not is_dropout(node, modules):
        return False
    if dropout_p(node, modules) == 0:
        return True
    if node.op == "call_module":
        return not training
    active = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
    return active is False


def _is_transparent(node: fx.Node, source: fx.Node, modules: dict[str, nn.Module], training: bool) -> bool:
    """Casts to the same dtype, views that keep the last dimension, idle dropouts."""
    if not node.args or node.args[0] is not source or source in node.args[1:]:
        return False
    if _is_idle_dropout(node, modules, training):
        return True
    name = node_name(node)
    if node.op == "call_module" or name not in _CASTS | _VIEWS:
        return False
    same_dtype = _dtype(node) is _dtype(source)
    return same_dtype and (name in _CASTS or (bool(_shape(node)) and _shape(node)[-1] == _shape(source)[-1]))


def _readers(node: fx.Node, modules: dict[str, nn.Module], training: bool) -> Iterator[fx.Node]:
    for user in node.users:
        if _is_transparent(user, node, modules, training):
            yield from _readers(user, modules, training)
        else:
            yield user


def find_readers(
    capture: Capture, modules: dict[str, nn.Module], source: str, linears: AbstractSet[str], training: bool
) -> Readers:
    """Readers of the leaf module ``source``.

    Args:
        capture: all recordings.
        modules: the model's modules by name.
        source: name of the module whose output is asked about.
        linears: names of the Linears that may be fused.
        training: the model's own mode, for scenarios that leave it.
    """
    seen: tuple[str, ...] | None = None
    problem = ""
    others: dict[str, None] = {}
    contiguous: set[str] = set()
    for recording in capture.recordings:
        mode = recording.scenario.training if recording.scenario.training is not None else training
        read = Counter[str]()
        for node in recording.leaf_nodes.get(source, ()):
            users = list(dict.fromkeys(_readers(node, modules, mode)))
            found = [user for user in users if user.op == "call_module" and user.target in linears]
            others |= {_describe(user): None for user in users if user not in found}
            names = tuple(str(user.target) for user in sorted(found, key=place_of))
            if len(set(names)) != len(names):
                problem = "a Linear reads the same output twice"
            elif seen is not None and set(seen) != set(names):
                problem = "its calls have different readers"
            seen = names if seen is None else seen
            for user in found:
                read[str(user.target)] += 1
                if needs_contiguous(user):
                    contiguous.add(str(user.target))
        stray = _stray_calls(recording, read, seen or ())
        if stray and not problem:
            problem = f"{stray} also reads something else"
    return Readers(seen or (), tuple(others), problem, frozenset(contiguous))


def _stray_calls(recording: Recording, read: Counter[str], names: tuple[str, ...]) -> str:
    """The first of the Linears that was called more often than it read the source."""
    counts = recording.call_counts()
    return next((name for name in names if counts[name] != read[name]), "")


def _describe(node: fx.Node) -> str:
    if node.op == "output":
        return "the model's output"
    stack = node.meta.get("nn_module_stack") or ("",)
    return f"{node_name(node)} in {stack[-1] or 'the root'}"


def needs_contiguous(linear: fx.Node) -> bool:
    """Whether a view of a Linear's output does more than split its last dimension."""
    leading = _shape(linear)[:-1]
    return any(
        user.op == "call_method" and user.target == "view" and _shape(user)[: len(leading)] != leading for user in linear.users
    )
