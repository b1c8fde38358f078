"""What Transformers' attention functions compute: found by name where it is Transformers' own business, else by a numeric probe."""

from __future__ import annotations

import dis
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from te_convert.facts.stand_in import ProbeError, relative_error

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]
"""(module, query, key, value [b, heads, s, d], attention_mask, scaling=, dropout=, ...) → (output [b, s, h, d], weights)."""

NAMES = {"sdpa": "te_convert", "eager": "te_convert_eager"}
"""Transformers' implementation → the name under which this package registers its stand-in."""

DIRECT = "direct"
"""Stands for an implementation where a module calls torch's scaled_dot_product_attention itself."""

IGNORED_TENSORS = frozenset(
    {
        "position_ids",
        "cache_position",
        "position_embeddings",
        "num_items_in_batch",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "labels",
        "decoder_input_ids",
    }
)
"""Tensor arguments that Transformers passes through every layer and that SDPA and eager attention do not read."""

BIAS = "position_bias"
"""Name under which Transformers' attention functions take what is added to the scaled scores."""

SINK = "s_aux"
"""Name under which they are given attention sinks: one more score for each head, of a key that has no value."""

UNDERSTOOD = frozenset({"module", "query", "key", "value", "attention_mask", "scaling", "dropout", "is_causal", "softcap"})
"""Arguments whose meaning is known."""

_TOLERANCE = 1e-4


def base_implementation(name: str) -> str:
    """The implementation that a name stands for: ``te_convert`` → ``sdpa``; any other name is itself."""
    return next((base for base, ours in NAMES.items() if ours == name), name)


def own_function(cls: type[nn.Module], implementation: str) -> AttentionFunction | None:
    """The function that a class's forward would get under an implementation, or None.

    It is looked up as the forward does: in the interface and with the eager function that the forward's own file holds, since a
    model may bring its own of either.
    """
    names: dict[str, Any] = getattr(inspect.unwrap(cls.forward), "__globals__", {})
    common = sys.modules.get("transformers.modeling_utils")
    interface = names.get("ALL_ATTENTION_FUNCTIONS", getattr(common, "ALL_ATTENTION_FUNCTIONS", None))
    found: AttentionFunction | None
    if implementation == "eager":
        found = names.get("eager_attention_forward")
    else:
        found = None if interface is None else interface.get(implementation)
    return found


@dataclass(frozen=True)
class AttentionFacts:
    """What all recorded calls of a module have in common.

    Attributes:
        heads: heads of the queries; ``groups`` of keys and values.
        channels: size of a head of queries and keys, and of values.
        scale: factor of the scores.
        softcap: bound of the scores, 0 for none.
        bias: every call brings a bias of the scores, of a shape that :func:`is_bias_shape` accepts.
        sink: name of the module's parameter [heads] that every call brings as sinks, "" without.
    """

    heads: int
    groups: int
    channels: tuple[int, int]
    scale: float
    softcap: float
    bias: bool = False
    sink: str = ""


def with_heads(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[b, h, s, d] for the other shapes that torch's function takes: [b, s, d], or several dimensions before the heads."""
    if len(shape) == 3:
        return (shape[0], 1, *shape[1:])
    return (math.prod(shape[:-3]), *shape[-3:]) if len(shape) > 4 else shape


def is_bias_shape(shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether TE takes a bias of this shape: for all samples or each, all heads or each, every query and key of ``sizes``."""
    return len(shape) == 4 and shape[0] in (1, sizes[0]) and shape[1] in (1, sizes[1]) and shape[2:] == sizes[2:]


def is_understood(function: AttentionFunction, tensors: tuple[str, ...], options: Mapping[str, Any]) -> str:
    """Why a call's further arguments may change the result in a way that is not known, or "".

    Args:
        function: the attention function.
        tensors: names of further arguments that hold tensors.
        options: further plain arguments.
    """
    unknown = [name for name in tensors if name not in IGNORED_TENSORS]
    if unknown:
        return f"tensors {', '.join(unknown)}"
    names = _parameters(function)
    read = [name for name in (*options, *tensors) if name in names and name not in UNDERSTOOD]
    return f"{', '.join(read)} of {getattr(function, '__name__', 'the attention function')}" if read else ""


def _parameters(function: AttentionFunction) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()


def calls_itself(forward: Callable[..., Any]) -> bool:
    """Whether a forward reaches torch's attention function through a global of its own, and is not the wrapper of another one.

    A method of that name (LitGPT has one) is not it: the function is then called from other code.
    """
    code = getattr(forward, "__code__", None)
    if code is None or hasattr(forward, "__wrapped__"):
        return False
    from_global = False  # whether the attribute that is loaded next belongs to a global, as in F.scaled_dot_product_attention
    for instruction in dis.get_instructions(code):
        if instruction.opname not in ("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD"):
            from_global = from_global and instruction.opname in ("EXTENDED_ARG", "PUSH_NULL")
            continue
        from_global = from_global or instruction.opname == "LOAD_GLOBAL"
        if from_global and instruction.argval == "scaled_dot_product_attention":
            return True
    return False


def compared_names(source: str) -> frozenset[str]:
    """Implementations that a model's source compares its own with, and would take another way under another name."""
    found: set[str] = set()
    for match in re.finditer(
        r"_attn_implementation\s*(?:==|!=|(?:not\s+)?in\b)\s*(\([^)]*\)|\[[^\]]*\]|\{[^}]*\}|[\"'][^\"']*[\"'])", source
    ):
        found.update(re.findall(r"[\"']([^\"']*)[\"']", match.group(1)))
    return frozenset(found)


def probe_attention(
    function: AttentionFunction, module: nn.Module, facts: AttentionFacts, implementation: str, options: Mapping[str, Any]
) -> None:
    """Check that a function is softmax attention with these facts, on random tensors, without and with masks.

    Where the calls bring a bias or sinks, it is given some.

    Without a mask SDPA is causal where the module is, and eager attention is full.

    Raises:
        ProbeError: it computes something else; the message says what was seen.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = [(facts.heads, facts.channels[0]), (facts.groups, facts.channels[0]), (facts.groups, facts.channels[1])]
    query, key, value = (torch.randn(2, h, 5, d, generator=generator, device="cpu") for h, d in sizes)
    keep = torch.rand(2, 1, 5, 5, generator=generator) > 0.3
    keep |= torch.eye(5, dtype=torch.bool)
    causal = implementation == "sdpa" and bool(options.get("is_causal", getattr(module, "is_causal", True)))
    plain = torch.ones(5, 5, dtype=torch.bool).tril() if causal else torch.ones(5, 5, dtype=torch.bool)
    added = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    given: dict[str, Any] = {name: value for name, value in options.items() if name != "output_attentions"}
    bias = torch.randn(2, facts.heads, 5, 5, generator=generator) if facts.bias else None
    given |= {} if bias is None else {BIAS: bias}
    sink = torch.randn(facts.heads, generator=generator) if facts.sink else None
    if sink is not None:
        module = _with_parameter(module, facts.sink, sink)
        given[SINK] = getattr(module, facts.sink)
    masks = ((None, plain), (added, keep), *(((keep, keep),) if implementation == "sdpa" else ()))
    for mask, visible in masks:
        try:
            with torch.no_grad():
                output = function(module, query, key, value, mask, scaling=facts.scale, dropout=0.0, **given)[0]
        except Exception as error:
            raise ProbeError(f"it raised {type(error).__name__}: {error}") from error
        expected = _attention((query, key, value), facts, visible, bias, sink)
        if output.shape != expected.shape:
            raise ProbeError(f"its output is {list(output.shape)}, not {list(expected.shape)}")
        difference = relative_error(output, expected)
        if not difference <= _TOLERANCE:
            where = "under a mask" if mask is not None else "without a mask"
            where += ("" if bias is None else ", with a bias") + ("" if sink is None else ", with sinks")
            raise ProbeError(f"it differs from softmax attention by {difference:.1e} {where}")


def _with_parameter(module: nn.Module, name: str, value: Tensor) -> nn.Module:
    """The same module with another value of one parameter."""
    other: nn.Module = module.__class__.__new__(module.__class__)
    other.__dict__.update(module.__dict__)
    other.__dict__["_parameters"] = {**module._parameters, name: nn.Parameter(value, requires_grad=False)}
    return other


def _attention(
    tensors: tuple[Tensor, Tensor, Tensor], facts: AttentionFacts, visible: Tensor, bias: Tensor | None, sink: Tensor | None
) -> Tensor:
    """softmax(cap(scale · q @ k.T) + bias) @ v, as [b, s, h, d]; with sinks in the sum below."""
    query, key, value = tensors
    repeats = facts.heads // facts.groups
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = facts.scale * (query @ key.transpose(-1, -2))
    if facts.softcap:
        scores = facts.softcap * torch.tanh(scores / facts.softcap)
    scores = scores if bias is None else scores + bias
    scores = scores.masked_fill(~visible, -torch.inf)
    if sink is None:
        return (scores.softmax(-1) @ value).transpose(1, 2)
    column = sink.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return (torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ value).transpose(1, 2)
