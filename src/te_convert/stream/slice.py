"""Parity of a shallow model with the real weights of some layers, under the plan of the whole model."""

from __future__ import annotations

import copy
import gc
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from te_convert.capture.inputs import derive_scenario
from te_convert.capture.run import describe_error
from te_convert.emit.slots import find_slots
from te_convert.emit.transformers_dir import build_from_config
from te_convert.plan.model import Plan
from te_convert.reasons import ReasonCode, reason
from te_convert.replacements.specs import DotProductAttentionSpec
from te_convert.rewrite.apply import apply_plan
from te_convert.stream.checkpoint import CHUNK_BYTES, Checkpoint, bytes_of, fill
from te_convert.stream.pieces import Layout
from te_convert.verify.gate import verify_applied
from te_convert.verify.model import Parity
from te_convert.verify.reference import record_reference

_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_LISTS = ("layer_types", "mlp_layer_types")
MOST_LAYERS = 4
_ROWS = 1024
"""Rows of an embedding that the slice keeps."""
LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_TWO_LAYERS_BYTES = 512 << 20
"""Two layers below this size are compared where one would do."""
_LARGE_BYTES = 64 << 20
"""Embeddings above this size are cut to their first rows."""


@dataclass
class SliceResult:
    """What the slice showed.

    Attributes:
        parity: status "slice" when it held, "failed", or "not-verified".
        layers: how many layers it had; 0 when it did not run.
        digests: tensor of the converted slice → SHA-256 of its bytes, for those that are whole.
        refused: globs of sites that failed and went back, with the reason.
    """

    parity: Parity
    layers: int = 0
    digests: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


Load = Callable[[str, torch.Size], tuple[torch.Tensor, bool] | None]
"""(name, shape in the slice) → the real tensor or its first rows, and whether it is whole; None when there is none that fits."""


class Shallow(NamedTuple):
    """A config with few layers, and the rows to which large embeddings are cut (None: they are not)."""

    config: Any
    layers: int
    rows: int | None


def verify_slice(outline: nn.Module, plan: Plan, load: Load, backend: str, most_bytes: int) -> SliceResult:
    """Build a shallow model of the same class, load real weights, apply the plan's part, and compare.

    Args:
        outline: the model without weights.
        plan: the plan of the whole model.
        load: reads a tensor.
        backend: "te" or "reference".
        most_bytes: the slice's weights stay below this.

    Returns:
        The result; a slice that cannot be built, loaded or run gives "not-verified" with a note that says why.
    """
    nothing = Parity("not-verified", backend)
    try:
        shallow = make_shallow(outline, plan)
    except ValueError as error:
        return SliceResult(replace(nothing, notes=(f"no slice was compared: {error}",)))
    try:
        with torch.random.fork_rng(devices=[]):
            model = build_from_config(type(outline), shallow.config)
        check_size(model, most_bytes)
        _untie_like(model, outline)
        whole = _fill(model, load)
        return _compare(model, _part(plan, model), shallow, whole, backend)
    except Exception as error:
        return SliceResult(replace(nothing, notes=(f"no slice was compared: {describe_error(error)}",)))
    finally:
        gc.collect()  # the model is in cycles, and the weights of a layer can be larger than everything that follows


def _physical_bytes() -> int:
    """Memory of this machine; comparing takes several times the slice's weights (float32 copies, gradients)."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_size(model: nn.Module, most_bytes: int) -> None:
    """Raise ValueError where the weights are above ``most_bytes`` or a tenth of this machine's memory."""
    most_bytes = min(most_bytes, _physical_bytes() // 10)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    if size > most_bytes:
        raise ValueError(f"its weights have {size / 1e9:.1f} GB, more than the {most_bytes / 1e9:.1f} GB that may be used")


def make_shallow(outline: nn.Module, plan: Plan, cut: bool = True) -> Shallow:
    """The config of a model with so many first layers that every kind of layer is there.

    Args:
        outline: the model without weights.
        plan: the decisions that tell kinds of layers apart.
        cut: large embeddings keep their first rows only.

    Raises:
        ValueError: the config has no number of layers.
    """
    config: Any = copy.deepcopy(getattr(outline, "config", None))
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    name = next((each for each in _DEPTHS if isinstance(getattr(text, each, None), int)), None)
    if name is None:
        raise ValueError(f"the config of {type(outline).__name__} has no number of layers")
    depth = min(getattr(text, name), _layers_to_see(plan, outline))
    setattr(text, name, depth)
    for each in _LISTS:
        if isinstance(getattr(text, each, None), list):
            setattr(text, each, getattr(text, each)[:depth])
    vocabulary = getattr(text, "vocab_size", None)
    embeddings = [m for m in outline.modules() if isinstance(m, nn.Embedding) and m.num_embeddings == vocabulary]
    if not (cut and any(m.weight.numel() * m.weight.element_size() > _LARGE_BYTES for m in embeddings)):
        return Shallow(config, depth, None)
    for holder in {id(config): config, id(text): text}.values():
        for key, value in list(vars(holder).items()):
            if key.endswith("_token_id") and isinstance(value, int) and value >= _ROWS:
                setattr(holder, key, None)
        if getattr(holder, "vocab_size", None) == vocabulary:
            holder.vocab_size = _ROWS
    return Shallow(config, depth, _ROWS)


def kinds_of_layers(plan: Plan) -> dict[int, int]:
    """Each layer that has converted sites → the first layer with the same ones."""
    kinds: dict[int, set[str]] = {}
    for site in plan.converting:
        found = re.match(r"(.*?\.)(\d+)\.(.*)", site.fqn)
        if found is not None:
            kinds.setdefault(int(found[2]), set()).add(f"{found[1]}#.{found[3]} {site.spec} {site.fused_into is not None}")
    first: dict[frozenset[str], int] = {}
    return {number: first.setdefault(frozenset(kinds[number]), number) for number in sorted(kinds)}


def _layers_to_see(plan: Plan, outline: nn.Module) -> int:
    """So many layers from the first on that every kind of converted layer is among them, at most MOST_LAYERS.

    Two where one would do, so that a layer is seen to take the result of another, unless they are large.
    """
    needed = min(max([1, *(number + 1 for number in kinds_of_layers(plan).values())]), MOST_LAYERS)
    first = [p for name, p in outline.named_parameters() if (found := LAYER.search(name)) is not None and int(found[0]) < 2]
    return 2 if needed == 1 and sum(p.numel() * p.element_size() for p in first) <= _TWO_LAYERS_BYTES else needed


def _untie_like(model: nn.Module, outline: nn.Module) -> None:
    """Parameters of their own for weights that are tied in the slice and not in the outline."""
    apart, first = find_slots(outline), dict[int, str]()
    for name, slot in find_slots(model).items():
        other = first.setdefault(id(slot.tensor), name)
        if other != name and name in apart and other in apart and apart[name].tensor is not apart[other].tensor:
            slot.replace(nn.Parameter(slot.tensor.detach().clone(), slot.tensor.requires_grad))


def _fill(model: nn.Module, load: Load) -> set[str]:
    """Give every parameter and persistent buffer its real values; the names of those that are not cut."""
    whole: set[str] = set()
    for name, slot in find_slots(model).items():
        if not slot.persistent:
            continue
        shape = slot.tensor.shape
        found = load(name, shape)
        if found is None:
            raise ValueError(f"the checkpoint has nothing for {name} {list(shape)}")
        slot.tensor.data, is_whole = found
        if is_whole:
            whole.add(name)
    return whole


def _part(plan: Plan, model: nn.Module) -> Plan:
    """The plan's decisions about modules that the slice has, with the sizes of cut embeddings' heads."""
    names = dict(model.named_modules(remove_duplicate=False))
    decisions = []
    for site in plan.decisions:
        if site.fqn in names or site.fqn.rpartition(".")[0] in names:
            weight = getattr(names.get(site.fqn), "weight", None)
            rows = getattr(site.spec, "out_features", None)
            spec: Any = site.spec
            if rows is not None and site.fused_into is None and isinstance(weight, torch.Tensor) and weight.shape[0] == _ROWS:
                spec = replace(spec, out_features=_ROWS)
            decisions.append(replace(site, spec=spec, aliases=tuple(a for a in site.aliases if a in names)))
    fusions = tuple(f for f in plan.fusions if f.scope in names and all(m.fqn in names for m in f.members))
    kept = {fusion.fqn for fusion in fusions}
    decisions = [site for site in decisions if site.fused_into is None or site.fused_into in kept]
    return replace(plan, decisions=tuple(decisions), fusions=fusions)


def _compare(model: nn.Module, plan: Plan, shallow: Shallow, whole: set[str], backend: str) -> SliceResult:
    scenario = derive_scenario(model.eval())
    if scenario is None:
        raise ValueError("no inputs could be derived")
    attention = any(isinstance(fusion.spec, DotProductAttentionSpec) for fusion in plan.fusions)
    reference = record_reference(model, (scenario,), hide_padding=attention)
    applied = apply_plan(model, plan, backend)
    parity = verify_applied(applied, reference)
    refused = {generalised(site.fqn): site.why for site in parity.reverted}
    status = "slice" if parity.status == "passed" else parity.status
    rows = f", embeddings cut to {shallow.rows} rows" if shallow.rows is not None else ""
    several = f"{shallow.layers} layers with the weights of layers 0 to {shallow.layers - 1}"
    depth = several if shallow.layers > 1 else "one layer with the weights of layer 0"
    note = f"a model of {depth} was compared{rows}"
    found = SliceResult(replace(parity, status=status, notes=(note, *parity.notes)), shallow.layers, refused=refused)
    if not refused:
        found.digests = _digests(applied.model, whole)
    return found


def _digests(model: nn.Module, whole: set[str]) -> dict[str, str]:
    """SHA-256 of the tensors of the converted slice; those of cut embeddings are left out by their rows."""
    found = {}
    for name, slot in find_slots(model).items():
        if slot.persistent and not (name not in whole and slot.tensor.shape[:1] == (_ROWS,)):
            found[name] = hashlib.sha256(bytes_of(slot.tensor.detach())).hexdigest()
    return found


def generalised(fqn: str) -> str:
    """The name of a site with its layer numbers as ``*``."""
    return LAYER.sub("*", fqn)


def refuse_like(plan: Plan, refused: Mapping[str, str]) -> Plan:
    """A plan without the sites that failed in the slice, in any layer."""
    places = [site.fqn for site in plan.swaps] + [fusion.fqn for fusion in plan.fusions]
    for fqn in places:
        why = refused.get(generalised(fqn))
        if why is not None:
            plan = plan.refuse(fqn, reason(ReasonCode.PARITY_FAILED, f"in the slice: {why}"))
    return plan


def read_layout(layout: Layout, checkpoint: Checkpoint, rows: int | None = None) -> torch.Tensor:
    """A tensor, or its first rows, in memory.

    Args:
        layout: pieces of the checkpoint's tensors; transposed ones come as a whole.
        checkpoint: where they are.
        rows: how many rows; None for all.
    """
    shape = layout.shape if rows is None else (rows, *layout.shape[1:])
    tensor = torch.empty(shape, dtype=checkpoint.entries[layout.pieces[0].source].dtype)
    fill(bytes_of(tensor), _parts(layout, checkpoint))
    return tensor.to(layout.dtype)


def _parts(layout: Layout, checkpoint: Checkpoint) -> Iterator[memoryview]:
    """The layout's bytes in the checkpoint's dtype; each part is valid until the next is asked for."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for piece in layout.pieces:
        width = checkpoint.entries[piece.source].dtype.itemsize
        if piece.columns:
            run = checkpoint.load(piece.source).view(-1)[piece.start : piece.start + piece.count]
            yield bytes_of(piece.arranged(run))
        else:
            yield from checkpoint.chunks(piece.source, piece.start * width, piece.count * width, buffer)


def digest_of(layout: Layout, checkpoint: Checkpoint) -> str:
    """SHA-256 of a tensor's bytes in the checkpoint's dtype."""
    found = hashlib.sha256()
    for part in _parts(layout, checkpoint):
        found.update(part)
    return found.hexdigest()
