"""The plan of a deep model from a shallow one that really ran, where a run with fake tensors is not possible."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from te_convert.capture.run import describe_error
from te_convert.config import ConvertConfig
from te_convert.emit.transformers_dir import build_from_config
from te_convert.match.fusion import Fusion
from te_convert.pipeline import observe
from te_convert.plan.choose import make_plan
from te_convert.plan.model import Decision, Plan
from te_convert.stream.slice import LAYER, Shallow, check_size, kinds_of_layers, make_shallow


def plan_from_shallow(outline: nn.Module, plan: Plan, config: ConvertConfig, most_bytes: int) -> Plan:
    """Plan a shallow model of the same class and widths on a real run, and repeat its layers' decisions over all layers.

    Its weights are random: a plan does not depend on them.  Each layer takes the decisions of the first layer that the plan
    without a run treats alike; those layers are all in the shallow model, or nothing is repeated.

    Args:
        outline: the model without weights.
        plan: its plan from the module tree alone, which is returned with a note when no shallow model can be run.
        config: the choices of the conversion.
        most_bytes: the shallow model's weights stay below this.
    """
    models = kinds_of_layers(plan)
    try:
        shallow = make_shallow(outline, plan, cut=False)
        small = _planned(type(outline), shallow, models, config, most_bytes)
    except Exception as error:
        return replace(plan, notes=(*plan.notes, f"no shallow model was planned in its place: {describe_error(error)}"))
    note = (
        f"the run with fake tensors failed, so a model of {shallow.layers} layers with random weights ran instead, "
        "and its decisions were repeated over all layers"
    )
    return _repeated(plan, small, models, note, [name for name, _ in outline.named_modules()])


def _planned(cls: type[nn.Module], shallow: Shallow, models: dict[int, int], config: ConvertConfig, most_bytes: int) -> Plan:
    if any(first >= shallow.layers for first in models.values()):
        raise ValueError(f"its layers are of more kinds than {shallow.layers} layers show")
    with torch.random.fork_rng(devices=[]):
        model = build_from_config(cls, shallow.config)
        check_size(model, most_bytes)
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.02)
    _, captured, _ = observe(model, (), config)
    if not captured.has_graph:
        why = captured.failures[0][1] if captured.failures else "no inputs could be derived"
        raise ValueError(f"it does not run: {why}")
    return make_plan(model, captured, config)


def _repeated(plan: Plan, small: Plan, models: dict[int, int], note: str, order: list[str]) -> Plan:
    known = {site.fqn: site for site in small.decisions}
    decisions = {site.fqn: _decision(site, known, models) for site in plan.decisions}
    for layer, model in models.items():  # what only a run shows: modules without parameters, as the attention of a layer
        for name, site in known.items():
            found = LAYER.search(name)
            if found is not None and int(found[0]) == model and _numbered(name, layer) not in decisions:
                new = replace(site, fqn=_numbered(name, layer), aliases=())
                decisions[new.fqn] = _decision(new, known, models)
    place = {name: index for index, name in enumerate(order)}
    sites = sorted(decisions.values(), key=lambda site: place.get(site.fqn, len(order)))
    outer = [fusion for fusion in small.fusions if not LAYER.search(fusion.fqn)]
    inner = [
        _moved(fusion, layer)
        for layer, model in models.items()
        for fusion in small.fusions
        if (found := LAYER.search(fusion.fqn)) is not None and int(found[0]) == model
    ]
    return replace(plan, decisions=tuple(sites), fusions=(*inner, *outer), scenarios=small.scenarios, notes=(*plan.notes, note))


def _decision(site: Decision, known: dict[str, Decision], models: dict[int, int]) -> Decision:
    found = LAYER.search(site.fqn)
    if found is None:
        return known.get(site.fqn, site)
    layer = int(found[0])
    like = known.get(_numbered(site.fqn, models.get(layer, layer)))
    if like is None or like.class_name != site.class_name:
        return site
    into = None if like.fused_into is None else _numbered(like.fused_into, layer)
    return replace(like, fqn=site.fqn, aliases=site.aliases, fused_into=into)


def _moved(fusion: Fusion, layer: int) -> Fusion:
    members: Any = tuple(replace(member, fqn=_numbered(member.fqn, layer)) for member in fusion.members)
    return replace(fusion, fqn=_numbered(fusion.fqn, layer), scope=_numbered(fusion.scope + ".", layer)[:-1], members=members)


def _numbered(name: str, layer: int) -> str:
    """The name with its first number, that of the layer, as ``layer``."""
    return LAYER.sub(str(layer), name, count=1)
