"""Modules that write their attention out, and whether every operation between the two products is understood."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from te_convert.capture.graph import Capture, Recording, place_of
from te_convert.facts.scores import Scores, begin, plain_name, probabilities, product_operands, step
from te_convert.facts.stand_in import relative_error
from te_convert.match.attention_cores import name_of, written_cores
from te_convert.match.candidate import Candidate
from te_convert.match.readers import dropout_p, is_dropout
from te_convert.match.regions import Region, RegionError
from te_convert.match.score_paths import Backwards, NotUnderstoodError, label
from te_convert.match.small_runs import MAX_ELEMENTS, elements, small_nodes

_TOLERANCE = 1e-4
_MAX_CONSTANT = 12
_SHAPE_ONLY = frozenset({"expand_as", "view_as", "type_as", "to", "after_mutation"})
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class EagerFacts:
    """What all recorded attentions of a module have in common.

    Attributes:
        heads: of queries, keys and values; 1 where they are never told apart from the samples.
        channels: size of a head of queries and keys, and of values.
        scale: factor of the scores.
        dtype: of the queries.
    """

    heads: int
    channels: tuple[int, int]
    scale: float
    dtype: torch.dtype


@dataclass
class EagerSite:
    """A module with written-out attention.

    Attributes:
        site: the module with what was observed.
        between: what stands between the two products.
        facts: None where its attentions were not understood.
        problem: why it cannot be replaced, or "".
        dropout: probability that is used in training.
        shapes: of queries and result, with their dtype, in the order of the calls.
    """

    site: Candidate
    between: tuple[str, ...] = ()
    facts: EagerFacts | None = None
    problem: str = ""
    dropout: float = 0.0
    shapes: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = field(default_factory=list)

    def refuse(self, problem: str) -> None:
        """Keep the first problem."""
        self.problem = self.problem or problem


@dataclass(frozen=True)
class _Path:
    """One attention in a graph: its nodes from the first product to the second, and what they do."""

    nodes: tuple[fx.Node, ...]
    scores: Scores
    heads: int
    value: fx.Node
    dropouts: frozenset[float]


def find_eager_attention(modules: dict[str, nn.Module], capture: Capture, candidates: Iterable[Candidate]) -> dict[str, EagerSite]:
    """Every module with a written-out attention, by name; those with a ``problem`` are refused."""
    by_name = {site.fqn: site for site in candidates}
    found: dict[str, EagerSite] = {}
    proved: dict[Hashable, str] = {}
    for recording in capture.recordings:
        probes = _Probes(modules, recording)
        for core in written_cores(recording.graph, lambda node: is_dropout(node, modules)):
            fqn = _owner(core.output)
            if fqn not in by_name:
                continue
            site = found.setdefault(fqn, EagerSite(by_name[fqn], core.between))
            try:
                recorded = Backwards(core.output, modules)
                reader, output = probes.reader_of(core.output, recorded)
                path = reader.path(output)
                _prove(path, reader, proved)
            except (NotUnderstoodError, RegionError) as error:
                site.refuse(str(error))
                continue
            _merge(site, path, recorded)
    for site in found.values():
        site.refuse(_obstacle(site.site.module))
    return found


def _owner(node: fx.Node) -> str:
    return str((node.meta.get("nn_module_stack") or ("",))[-1])


def _obstacle(module: nn.Module) -> str:
    if "forward" in module.__dict__ or isinstance(module, torch.jit.ScriptModule):
        return "its forward was replaced, or is compiled"
    return "it is a module of torch itself" if type(module).__module__.startswith("torch.") else ""


def _merge(site: EagerSite, path: _Path, recorded: Backwards) -> None:
    scores, value = path.scores, path.value.meta["tensor_meta"]
    facts = EagerFacts(path.heads, (scores.query.shape[-1], value.shape[-1]), scores.scale, scores.query.dtype)
    if site.facts is not None and site.facts != facts:
        site.refuse("its attentions differ in heads, sizes or scale")
    if len({site.dropout, *path.dropouts} - {0.0}) > 1:
        site.refuse("its attentions differ in dropout")
    site.facts, site.dropout = facts, max((site.dropout, *path.dropouts))
    query, result = (recorded.factors[0].meta["tensor_meta"].shape, recorded.value.meta["tensor_meta"].shape)
    site.shapes.append((tuple(query), (*result[:-2], query[-2], result[-1]), facts.dtype))


class _Probes:
    """Where the attentions of a recording are looked at: in itself, or if they are large, in a small run that went the same way."""

    def __init__(self, modules: dict[str, nn.Module], recording: Recording) -> None:
        self.modules, self.recording = modules, recording
        self._here = _Reader(modules, recording)

    def reader_of(self, output: fx.Node, recorded: Backwards) -> tuple[_Reader, fx.Node]:
        """A reader, and the node in its graph that stands for ``output``.

        Raises:
            NotUnderstoodError: the scores are large, and no small run shows the same.
        """
        scores = elements(recorded.product)
        if scores <= MAX_ELEMENTS:
            return self._here, output
        if self._small is None:
            raise NotUnderstoodError(f"its {scores:,} scores are too many for a probe, and shorter inputs do not run the same way")
        reader, nodes = self._small
        return reader, nodes[output]

    @cached_property
    def _small(self) -> tuple[_Reader, dict[fx.Node, fx.Node]] | None:
        found = small_nodes(self.modules[""], self.recording)
        return None if found is None else (_Reader(self.modules, found[0]), found[1])


class _Reader:
    """Follows scores through one recorded graph with the steps that the running model takes too."""

    def __init__(self, modules: dict[str, nn.Module], recording: Recording) -> None:
        self.modules, self.recording = modules, recording
        self._values: dict[fx.Node, Tensor] = {}

    def path(self, output: fx.Node) -> _Path:
        """The attention whose result is ``output``.

        Raises:
            NotUnderstoodError: some operation on the way does something else, or the scores have other readers.
        """
        before = Backwards(output, self.modules)
        product = before.product
        if _owner(product) != _owner(output):
            raise NotUnderstoodError("the two products are in different modules")
        meta = before.factors[0].meta.get("tensor_meta")
        if meta is None or meta.dtype not in _DTYPES:
            raise NotUnderstoodError(f"its queries are {'unknown' if meta is None else str(meta.dtype).removeprefix('torch.')}")
        first, second = (self.value(node) for node in before.factors)
        args, kwargs = self._arguments(product, {before.factors[0]: first, before.factors[1]: second})
        scores = begin(name_of(product), args, kwargs)
        if scores is None:
            raise NotUnderstoodError(f"{name_of(product)} is not a product of queries and transposed keys")
        state: dict[fx.Node, Scores] = {product: scores}
        heads = _heads(scores.shape)
        dropouts: set[float] = set()
        nodes = [product]
        for node in before.between:
            source = next(item for item in node.all_input_nodes if item in state)
            name, args, kwargs = self._call(node, source)
            after = step(state[source], source, name, args, kwargs)
            if after is None:
                raise NotUnderstoodError(f"{label(node, self.modules)} does something to the scores that TE's attention does not")
            if is_dropout(node, self.modules):
                dropouts.add(after.dropout and dropout_p(node, self.modules))
            state[node] = after
            heads = max(heads, _heads(after.shape))
            nodes.append(node)
        last = state[nodes[-1]]
        if not last.is_softmax:
            raise NotUnderstoodError("there is no softmax over the keys")
        self._check_readers(nodes, output)
        return _Path((*nodes, output), last, heads, before.value, frozenset(dropouts))

    def _call(self, node: fx.Node, source: fx.Node) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        """A node as a function's name and arguments, in which ``source`` stands for the scores."""
        if node.op == "call_module":
            module = self.modules[str(node.target)]
            if isinstance(module, nn.Softmax):
                return "softmax", (source, module.dim), {}
            if isinstance(module, nn.Dropout):
                training = self.recording.scenario.training
                return "dropout", (source, module.p, module.training if training is None else training), {}
            return "", (), {}
        args, kwargs = self._arguments(node, {source: source})
        return plain_name(name_of(node))[0], args, kwargs

    def _arguments(self, node: fx.Node, known: dict[fx.Node, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda item: known[item] if item in known else self.value(item))
        return tuple(args), dict(kwargs)

    def _check_readers(self, nodes: list[fx.Node], output: fx.Node) -> None:
        path = {*nodes, output}
        for node in nodes:
            for user in node.users:
                only_shape = name_of(user) in _SHAPE_ONLY and user.args[:1] != (node,)
                if user in path or only_shape or (name_of(user) == "after_mutation" and not user.users):
                    continue
                if user.op == "output":
                    raise NotUnderstoodError("its scores or probabilities are part of the model's output")
                raise NotUnderstoodError(
                    f"{label(user, self.modules)} in {_owner(user) or 'the root'} reads its scores or probabilities too"
                )

    def value(self, node: fx.Node) -> Tensor:
        """A tensor for a node outside the path: its own value where it is a constant, else a random one of its shape.

        Raises:
            NotUnderstoodError: a number that the run computed, or integers.
        """
        if node not in self._values:
            constant = self._constant(node)
            self._values[node] = self._random(node) if constant is None else constant
        return self._values[node]

    def _constant(self, node: fx.Node, limit: int = _MAX_CONSTANT) -> Tensor | None:
        """The value of a node that depends on no input, or None."""
        waiting, needed = [node], dict.fromkeys([node])
        while waiting:
            current = waiting.pop()
            if current.op not in ("get_attr", "call_function", "call_method") or len(needed) > limit:
                return None
            waiting += [item for item in current.all_input_nodes if item not in needed]
            needed |= dict.fromkeys(current.all_input_nodes)
        env: dict[fx.Node, Any] = {}
        try:
            for current in sorted(needed, key=place_of):
                if current.op == "get_attr":
                    env[current] = self._attribute(str(current.target))
                    if env[current] is None:
                        return None
            steps = tuple(n for n in sorted(needed, key=place_of) if n.op != "get_attr")
            value = Region(tuple(env), node, steps).evaluate(self.modules, list(env.values())) if steps else env[node]
        except RegionError:
            return None
        meta = node.meta.get("tensor_meta")
        return value.to(meta.dtype) if meta is not None and value.is_floating_point() else value

    def _attribute(self, name: str) -> Tensor | None:
        if name in self.recording.constants:
            return self.recording.constants[name]
        holder, _, leaf = name.rpartition(".")
        value = getattr(self.modules.get(holder), leaf, None)
        if not isinstance(value, Tensor) or value.is_meta or isinstance(value, nn.Parameter):
            return None
        return value.detach().cpu()

    def _random(self, node: fx.Node) -> Tensor:
        meta = node.meta.get("tensor_meta")
        if meta is None or (not meta.dtype.is_floating_point and meta.dtype is not torch.bool):
            raise NotUnderstoodError(f"{label(node, self.modules)} gives no floating-point numbers and no mask")
        if len(meta.shape) == 0:
            raise NotUnderstoodError(f"a number is computed by {label(node, self.modules)}")
        generator = torch.Generator().manual_seed(place_of(node))
        if meta.dtype is torch.bool:
            mask = torch.rand(meta.shape, generator=generator) > 0.5
            mask[..., 0], mask[..., 1:2] = True, False  # of either meaning, each row sees something
            return mask
        return torch.randn(meta.shape, generator=generator).to(meta.dtype)


def _heads(shape: tuple[int, ...]) -> int:
    return shape[-3] if len(shape) > 3 else 1


def _operands(nodes: tuple[fx.Node, ...]) -> Iterator[fx.Node]:
    """What the nodes of a path read from elsewhere, each once."""
    seen = set(nodes)
    for node in nodes:
        for item in node.all_input_nodes:
            if item not in seen:
                seen.add(item)
                yield item


def _prove(path: _Path, reader: _Reader, proved: dict[Hashable, str]) -> None:
    """Evaluate the recorded operations and the attention that they were taken for on the same random numbers.

    Raises:
        NotUnderstoodError: they differ.
    """
    inputs = tuple(sorted(_operands(path.nodes), key=place_of))
    region = Region(inputs, path.nodes[-1], path.nodes)
    key = region.key(reader.modules)
    if key not in proved:
        proved[key] = _difference(path, region, reader)
    if proved[key]:
        raise NotUnderstoodError(proved[key])


def _difference(path: _Path, region: Region, reader: _Reader) -> str:
    values = [reader.value(node) for node in region.inputs]
    wide = [value.float() if value.is_floating_point() else value for value in values]
    output = region.evaluate(reader.modules, wide)
    scores = path.scores
    with torch.no_grad():
        weights = probabilities(_widened(scores))
        value = reader.value(path.value).float()
        pair = product_operands(name_of(path.nodes[-1]), *reader._arguments(path.nodes[-1], {path.nodes[-2]: weights}))
        value = value if pair is None else pair[1].float()
        if value.shape[:-2] != scores.lead or value.shape[-2] != scores.shape[-1]:
            return "the values do not belong to the probabilities"
        expected = weights.reshape(scores.shape) @ value
    if output.shape != expected.shape:
        return f"its output is {list(output.shape)}, not {list(expected.shape)}"
    difference = relative_error(output, expected)
    return "" if difference <= _TOLERANCE else f"it differs from softmax attention by {difference:.1e}"


def _widened(scores: Scores) -> Scores:
    terms = tuple(replace(term, tensor=term.tensor.float()) if term.tensor.is_floating_point() else term for term in scores.terms)
    return replace(scores, query=scores.query.float(), key=scores.key.float(), terms=terms)
