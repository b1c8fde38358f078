"""The stretch between Linears that open a tensor-parallel region and the one that closes it: is each rank's part its own business?

What each rank computes from its rows of the opening Linears has to be its columns of the closing one's input.  That is tried out:
the recorded operations run on random values, whole and in parts, with the attention function replaced by a plain one.  A reshape
that names the number of heads, a softmax or norm over divided features, or a split of packed projections does not pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from te_convert.capture.graph import Recording
from te_convert.facts.stand_in import isolated
from te_convert.match.readers import node_name
from te_convert.match.regions import RegionError, run_node

MAX_NODES = 200
_CLOSE = 1e-4
_BLOCKS = (1, 3, 2)
"""Ways to divide the rows of one opening Linear: as they are, as three blocks (packed q, k, v), as two (packed gate, up)."""


@dataclass(frozen=True)
class Originals:
    """A model before its conversion, which moves parameters elsewhere.

    Attributes:
        modules: by name.
        holders: names of modules with parameters in them.
        parameters: names.
    """

    modules: dict[str, nn.Module]
    holders: frozenset[str]
    parameters: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module) -> Originals:
        """As the model is now."""
        modules = dict(model.named_modules())
        holders = frozenset(name for name, module in modules.items() if next(module.parameters(), None) is not None)
        return cls(modules, holders, frozenset(name for name, _ in model.named_parameters(remove_duplicate=False)))


@dataclass(frozen=True)
class Core:
    """One call of an attention function.

    Attributes:
        fqn: the attention module.
        inputs: nodes of queries, keys and values, [b, h, s, d].
        output: node of the result.
        transposed: the result is [b, s, h, d].
    """

    fqn: str
    inputs: tuple[fx.Node, ...]
    output: fx.Node
    transposed: bool

    def inner(self) -> set[fx.Node]:
        """The nodes of the function's own body."""
        found: set[fx.Node] = set()
        waiting = [self.output]
        while waiting and len(found) < MAX_NODES:
            node = waiting.pop()
            if node not in found and node not in self.inputs:
                found.add(node)
                waiting += node.all_input_nodes
        return found

    def run(self, values: list[Tensor]) -> Tensor:
        """A function of the same structure: each head of the queries reads its own head of keys and values."""
        query, key, value = values
        out = F.scaled_dot_product_attention(query, key, value, enable_gqa=query.shape[1] != key.shape[1])
        return out.transpose(1, 2) if self.transposed else out


@dataclass(frozen=True)
class ParallelRegion:
    """What lies between.

    Attributes:
        linears: names of the opening Linears with the number of blocks in which their rows are divided.
        core: the attention module inside, or "".
    """

    linears: tuple[tuple[str, int], ...]
    core: str


def find_cores(recording: Recording, direct: frozenset[str]) -> dict[fx.Node, Core]:
    """Calls of attention functions by the node of their result; ``direct`` names the modules that call torch's themselves."""
    found: dict[fx.Node, Core] = {}
    for call in recording.attention:
        nodes = [node for node in call.nodes if node is not None]
        if len(nodes) == 4:
            found[nodes[3]] = Core(call.fqn, tuple(nodes[:3]), nodes[3], transposed=True)
    told = {core.fqn for core in found.values()}
    for node in recording.graph.nodes:
        stack = node.meta.get("nn_module_stack") or ("",)
        if node.target is F.scaled_dot_product_attention and stack[-1] in direct and stack[-1] not in told:
            given = dict(zip(("query", "key", "value"), node.args, strict=False)) | dict(node.kwargs)
            nodes = [value for name in ("query", "key", "value") if isinstance(value := given.get(name), fx.Node)]
            if len(nodes) == 3:
                found[node] = Core(str(stack[-1]), tuple(nodes), node, transposed=False)
    return found


def find_parallel_region(
    closing: fx.Node,
    linears: frozenset[str],
    cores: dict[fx.Node, Core],
    model: Originals,
    size: int,
    check_core: Callable[[str], None],
) -> ParallelRegion:
    """The region that a Linear closes, proved by trying it out.

    Args:
        closing: a call of the Linear.
        linears: names of the Linears that may open one.
        cores: of :func:`find_cores`.
        model: the original.
        size: number of ranks.
        check_core: raises a RegionError for an attention that cannot be divided.

    Raises:
        RegionError: what stands in the way.
    """
    sources, between, used = _walk(closing, linears, cores, model)
    _check_gradients(closing.graph, between, used, model)
    _check_readers(sources, between, closing, [cores[node] for node in between if node in cores])
    inside = [cores[node].fqn for node in between if node in cores]
    if len(inside) > 1:
        raise RegionError("several attentions feed it")
    for fqn in inside:
        check_core(fqn)
    first = "no way to divide it"
    for blocks in _BLOCKS if len(sources) == 1 else _BLOCKS[:1]:
        try:
            _try_out(closing, sources, between, cores, model.modules, size, blocks)
        except RegionError as error:
            first = str(error) if blocks == 1 else first
            continue
        return ParallelRegion(tuple((str(node.target), blocks) for node in sources), inside[0] if inside else "")
    raise RegionError(first)


def _walk(
    closing: fx.Node, linears: frozenset[str], cores: dict[fx.Node, Core], model: Originals
) -> tuple[list[fx.Node], list[fx.Node], set[fx.Node]]:
    """Opening calls, the nodes that depend on them, and what else those use."""
    sources: dict[fx.Node, None] = {}
    seen: dict[fx.Node, None] = {}
    waiting = list(closing.all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node in seen or node in sources:
            continue
        if node.op == "call_module" and node.target in linears:
            sources[node] = None
            continue
        seen[node] = None
        if len(seen) > MAX_NODES:
            raise RegionError(f"more than {MAX_NODES} operations before it")
        waiting += cores[node].inputs if node in cores else node.all_input_nodes
    if not sources:
        raise RegionError("its input comes from no converted Linear")
    between: dict[fx.Node, None] = {}
    for node in closing.graph.nodes:
        needs = cores[node].inputs if node in cores else node.all_input_nodes
        if node in seen and any(need in sources or need in between for need in needs):
            between[node] = None
            if node.op == "call_module" and node.target in model.holders:
                raise RegionError(f"{node.target} before it has parameters")
    if not all(node in sources or node in between for node in closing.all_input_nodes):
        raise RegionError("its input comes from no converted Linear")
    used = {
        need
        for node in between
        for need in (cores[node].inputs if node in cores else node.all_input_nodes)
        if need not in sources and need not in between
    }
    return list(sources), list(between), used


def _check_gradients(graph: fx.Graph, between: list[fx.Node], used: set[fx.Node], model: Originals) -> None:
    """Nothing that has a gradient may enter from outside: each rank would see its part of it."""
    trained: set[fx.Node] = set()
    for node in graph.nodes:
        own = node.op == "call_module" and node.target in model.holders
        own = own or (node.op == "get_attr" and node.target in model.parameters)
        if own or any(need in trained for need in node.all_input_nodes):
            trained.add(node)
    outside = next((node for node in graph.nodes if node in used and node in trained), None)
    if outside is not None:
        raise RegionError(f"{node_name(outside)} enters it, whose gradient would be that of one part")


def _check_readers(sources: list[fx.Node], between: list[fx.Node], closing: fx.Node, cores: list[Core]) -> None:
    """What is inside is read by nothing outside; results of the model (a cache) may hold a part of it."""
    inside = {*sources, *between, *(node for core in cores for node in core.inner())}
    for node in (*sources, *between):
        for user in node.users:
            if user not in inside and user.op != "output" and user.users and not _is_call_of(user, closing):
                raise RegionError(f"{node_name(user)} also reads {node_name(node)}")


def _is_call_of(node: fx.Node, closing: fx.Node) -> bool:
    return node.op == "call_module" and node.target == closing.target


def _shape(node: fx.Node) -> tuple[int, ...]:
    meta = node.meta.get("tensor_meta")
    if meta is None:
        raise RegionError(f"the value of {node_name(node)} is not known")
    return tuple(meta.shape)


def _try_out(
    closing: fx.Node,
    sources: list[fx.Node],
    between: list[fx.Node],
    cores: dict[fx.Node, Core],
    modules: dict[str, nn.Module],
    size: int,
    blocks: int,
) -> None:
    generator = torch.Generator().manual_seed(5)
    (last,) = closing.all_input_nodes
    outside = {
        need: _random(need, generator)
        for node in between
        for need in (cores[node].inputs if node in cores else node.all_input_nodes)
        if need not in sources and need not in between
    }
    opened = {node: _random(node, generator) for node in sources}
    whole = _evaluate(last, opened | outside, between, cores, modules)
    for rank in range(size):
        parts = {node: divide(value, -1, ((value.shape[-1], blocks),), rank, size) for node, value in opened.items()}
        part = _evaluate(last, parts | outside, between, cores, modules)
        expected = divide(whole, -1, ((whole.shape[-1], 1),), rank, size)
        if part.shape != expected.shape or not torch.allclose(part, expected, rtol=_CLOSE, atol=_CLOSE * float(whole.abs().max())):
            raise RegionError("the features of one rank depend on those of another")


def _random(node: fx.Node, generator: torch.Generator) -> Tensor:
    shape, dtype = _shape(node), node.meta["tensor_meta"].dtype
    return torch.randn(shape, generator=generator) if dtype.is_floating_point else torch.ones(shape, dtype=dtype)


def _evaluate(
    last: fx.Node,
    given: dict[fx.Node, Tensor],
    between: list[fx.Node],
    cores: dict[fx.Node, Core],
    modules: dict[str, nn.Module],
) -> Tensor:
    env = {node: value.clone() for node, value in given.items()}
    try:
        with isolated():
            for node in between:
                core = cores.get(node)
                env[node] = run_node(node, env, modules) if core is None else core.run([env[need] for need in core.inputs])
    except RegionError:
        raise
    except Exception as error:  # whatever foreign code raises for other sizes
        raise RegionError(f"{node_name(node)} does not take a part of the features: {str(error).splitlines()[0]}") from error
    result = env[last]
    if not isinstance(result, Tensor):
        raise RegionError("its input is no tensor")
    return result


def divide(tensor: Tensor, dim: int, segments: tuple[tuple[int, int], ...], rank: int, size: int) -> Tensor:
    """One rank's part along a dimension.

    Args:
        tensor: the whole.
        dim: which dimension.
        segments: (length, blocks) one after the other; each block is divided evenly.
        rank: whose part.
        size: number of parts.

    Raises:
        RegionError: a block cannot be divided.
    """
    parts, start = [], 0
    for length, blocks in segments:
        if length % (blocks * size):
            raise RegionError(f"{length} features in {blocks} blocks cannot be divided by {size}")
        block = length // blocks
        each = block // size
        parts += [tensor.narrow(dim, start + index * block + rank * each, each) for index in range(blocks)]
        start += length
    return torch.cat(parts, dim)


def assemble(parts: list[Tensor], dim: int, segments: tuple[tuple[int, int], ...]) -> Tensor:
    """The inverse of :func:`divide`: the parts of all ranks in their order → the whole."""
    size, found, start = len(parts), [], 0
    for length, blocks in segments:
        each = length // blocks // size
        for index in range(blocks):
            found += [part.narrow(dim, start + index * each, each) for part in parts]
        start += length // size
    return torch.cat(found, dim)
