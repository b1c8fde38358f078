"""Find a transformer block in the recorded graph: norm, attention, residual, norm, MLP, residual, in one of three orders.

    pre-norm   x + attention(n1(x)), then + mlp(n2(.))
    post-norm  n1(x + attention(x)), then n2(. + mlp(.))
    parallel   x + attention(n1(x)) + mlp(n2(x)); one norm for both is found too, though TE's layer has a weight for each

What is found is a candidate; the rule proves it by running both on numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx, nn

from te_convert.capture.graph import ModuleCall, Recording, place_of
from te_convert.match.attention_cores import SHAPES, AttentionCore, called_core, name_of, written_core
from te_convert.match.blocks import Block
from te_convert.match.readers import is_dropout, node_name

_MAX_STEPS = 40


class BlockError(Exception):
    """Why a module is no transformer block that te.TransformerLayer could be."""


@dataclass(frozen=True)
class Parts:
    """The modules of a block by function; names relative to the model.

    Attributes:
        order: "pre", "post" or "parallel".
        norms: of the attention and of the MLP.
        qkv: one packed Linear, or three.
        proj: behind the attention.
        inputs: the MLP's first Linear, or (gate, up) in graph order.
        down: the MLP's last Linear.
        heads: number of attention heads.
        is_causal: the attention is causal; None for one that is written out, whose mask only numbers show.
        first, last: nodes of the MLP's first and last Linear.
    """

    order: str
    norms: tuple[str, str]
    qkv: tuple[str, ...]
    proj: str
    inputs: tuple[str, ...]
    down: str
    heads: int
    is_causal: bool | None
    first: fx.Node
    last: fx.Node


@dataclass(frozen=True)
class _Form:
    """What an attention may have: a mask, and a cache of keys and values."""

    masked: bool
    cached: bool


def parse_block(block: Block, recording: Recording, call: ModuleCall) -> Parts:
    """The parts of one recorded call with one tensor and nothing else.

    Raises:
        BlockError: it is not of one of the three forms.
    """
    if call.n_positional != 1 or call.keywords or len(call.args) != 1:
        raise BlockError("it takes more than one tensor")
    return find_parts(block, call)


def find_parts(block: Block, call: ModuleCall, *, masked: bool = False, cached: bool = False) -> Parts:
    """The parts of one recorded call whose first tensor is the block's input.

    Args:
        block: what is looked at.
        call: one of its calls.
        masked: its attention may have a mask; what it does without one, only numbers show.
        cached: keys and values may go through a cache.

    Raises:
        BlockError: it is not of one of the three forms.
    """
    if not call.args or call.args[0] is None or call.output is None:
        raise BlockError("its input or output is not known")
    form = _Form(masked, cached)
    x, out = _look_through(call.args[0], block), _look_through(call.output, block)
    post = _is_norm(out, block)
    top = out.all_input_nodes[0] if post else out
    terms = _terms(top, block, x)
    added = [node for node in terms if node is not x and _is_linear(node, block)]
    down = next((node for node in added if not _attention_behind(node, block)), None)
    if down is None:
        raise BlockError("no MLP is added last")
    inputs = _linears_behind(down, block)
    norm_out = _source(inputs[0], block)
    if post:
        return _post_norm(block, form, (x, out), terms, down, inputs)
    mlp_norm = norm_out
    if not _is_norm(mlp_norm, block):
        raise BlockError("no norm stands before the MLP")
    proj = _projection(terms, block)
    core = _core_of(proj, block)
    qkv = _qkv(core, block, form)
    norm = _source(qkv[0], block)
    if not _is_norm(norm, block) or any(_source(node, block) is not norm for node in qkv):
        raise BlockError("no norm stands before the attention")
    if _source(norm, block) is not x or x not in terms or len(terms) != 3:
        raise BlockError("its residual is not its input")
    order = "parallel" if _source(mlp_norm, block) is x else "pre"
    if order == "pre" and not _is_sum_of(_source(mlp_norm, block), (x, proj), block, x):
        raise BlockError("its second norm does not read the first residual")
    return _parts(order, (norm, mlp_norm), qkv, proj, inputs, down, core, form)


def _post_norm(
    block: Block, form: _Form, ends: tuple[fx.Node, fx.Node], terms: list[fx.Node], down: fx.Node, inputs: list[fx.Node]
) -> Parts:
    x, out = ends
    middle = _source(inputs[0], block)
    if not _is_norm(middle, block) or set(terms) != {middle, down}:
        raise BlockError("its second residual is not the first norm's output")
    inner = _terms(middle.all_input_nodes[0], block, x)
    proj = _projection(inner, block)
    core = _core_of(proj, block)
    qkv = _qkv(core, block, form)
    if set(inner) != {x, proj} or any(_source(node, block) is not x for node in qkv):
        raise BlockError("its first residual is not its input")
    return _parts("post", (middle, out), qkv, proj, inputs, down, core, form)


def _parts(
    order: str,
    norms: tuple[fx.Node, fx.Node],
    qkv: list[fx.Node],
    proj: fx.Node,
    inputs: list[fx.Node],
    down: fx.Node,
    core: AttentionCore,
    form: _Form,
) -> Parts:
    shape = core.query.meta["tensor_meta"].shape
    if len(shape) != 4:
        raise BlockError("its attention has no head dimension")
    return Parts(
        order=order,
        norms=(str(norms[0].target), str(norms[1].target)),
        qkv=tuple(str(node.target) for node in qkv),
        proj=str(proj.target),
        inputs=tuple(str(node.target) for node in inputs),
        down=str(down.target),
        heads=int(shape[1]),
        is_causal=_is_causal(core.output, form.masked) if core.is_call else None,
        first=inputs[0],
        last=down,
    )


def _is_causal(sdpa: fx.Node, masked: bool) -> bool | None:
    """None where a mask may decide; raises BlockError for grouped heads, and elsewhere for a mask or dropout too."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, sdpa.args, strict=False)), **sdpa.kwargs}
    masks = given.get("attn_mask") is not None or given.get("dropout_p")
    if given.get("enable_gqa") or (masks and not masked):
        raise BlockError("its attention has a mask, dropout or grouped heads")
    return None if masked else bool(given.get("is_causal", False))


def _is_norm(node: fx.Node, block: Block) -> bool:
    return node.op == "call_module" and node.target in block.norms


def _is_linear(node: fx.Node, block: Block) -> bool:
    return node.op == "call_module" and node.target in block.linears


def _is_idle(node: fx.Node, block: Block) -> bool:
    """A dropout, or nn.Identity: nothing, as the rule demands p = 0."""
    return is_dropout(node, block.modules) or (
        node.op == "call_module" and isinstance(block.modules.get(str(node.target)), nn.Identity)
    )


def _look_through(node: fx.Node, block: Block) -> fx.Node:
    while _is_idle(node, block) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _source(node: fx.Node, block: Block) -> fx.Node:
    """What a Linear or a norm reads."""
    if len(node.all_input_nodes) != 1:
        raise BlockError(f"{node_name(node)} reads several tensors")
    return _look_through(node.all_input_nodes[0], block)


def _terms(node: fx.Node, block: Block, stop: fx.Node) -> list[fx.Node]:
    """The summands of nested additions."""
    node = _look_through(node, block)
    plain = node.op in ("call_function", "call_method") and node_name(node) in ("add", "add_", "iadd", "__add__", "__iadd__")
    if node is stop or not plain or node.kwargs or len(node.all_input_nodes) != 2:
        return [node]
    return [term for operand in node.all_input_nodes for term in _terms(operand, block, stop)]


def _is_sum_of(node: fx.Node, wanted: tuple[fx.Node, ...], block: Block, stop: fx.Node) -> bool:
    return set(_terms(node, block, stop)) == set(wanted)


def _attention_behind(node: fx.Node, block: Block) -> AttentionCore | None:
    """The attention whose output a Linear reads, through changes of shape."""
    if not _is_linear(node, block):
        return None
    for _ in range(_MAX_STEPS):
        if len(node.all_input_nodes) != 1:
            return None
        node = node.all_input_nodes[0]
        core = called_core(node) or written_core(node, lambda found: _is_idle(found, block))
        if core is not None:
            return core
        if name_of(node) not in SHAPES and not _is_idle(node, block):
            return None
    return None


def _core_of(proj: fx.Node, block: Block) -> AttentionCore:
    core = _attention_behind(proj, block)
    assert core is not None  # that is what makes it the projection
    return core


def _projection(terms: list[fx.Node], block: Block) -> fx.Node:
    found = [node for node in terms if _attention_behind(node, block) is not None]
    if len(found) != 1:
        raise BlockError("no attention is added to the residual")
    return found[0]


def _qkv(core: AttentionCore, block: Block, form: _Form) -> list[fx.Node]:
    """The Linears behind queries, keys and values: three, or one for all."""
    found = []
    for start in (core.query, core.key, core.value):
        node, steps = start, 0
        while not _is_linear(node, block):
            known = (
                _is_idle(node, block)
                or name_of(node) in SHAPES
                or (not core.is_call and name_of(node) in ("mul", "div", "truediv"))
            )
            if form.cached and name_of(node) == "cat":  # what was there before, and the new keys or values
                node, steps = node.all_input_nodes[-1], steps + 1
                continue
            if not known or len(node.all_input_nodes) != 1 or steps > _MAX_STEPS:
                raise BlockError(f"{node_name(node)} stands between the projections and the attention")
            node, steps = node.all_input_nodes[0], steps + 1
        found.append(node)
    unique = list(dict.fromkeys(found))
    if len(unique) not in (1, 3):
        raise BlockError("queries, keys and values come from two Linears")
    return unique


def _linears_behind(down: fx.Node, block: Block) -> list[fx.Node]:
    """The MLP's first Linears, in graph order."""
    waiting, seen, found = list(down.all_input_nodes), set(), []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if _is_linear(node, block):
            found.append(node)
        elif node.op in ("placeholder", "get_attr") or len(seen) > _MAX_STEPS:
            raise BlockError("its MLP reads something else too")
        else:
            waiting += node.all_input_nodes
    if not found:
        raise BlockError("no Linear stands before the MLP's last")
    return sorted(found, key=place_of)


def random_input(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Seeded values of a recorded shape on the device and in the dtype of a parameter."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(like.device, like.dtype)
