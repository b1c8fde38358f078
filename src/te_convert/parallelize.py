"""Tensor parallelism as the last stage of a conversion: roles, the division, and its verification on the ranks themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from te_convert.capture.graph import Capture
from te_convert.capture.scenario import Scenario
from te_convert.capture.tensors import iter_tensors, model_device
from te_convert.errors import ConversionError, InputError
from te_convert.match.parallel_regions import Originals
from te_convert.plan.model import Plan
from te_convert.plan.tensor_parallel import Roles, find_roles
from te_convert.rewrite.tensor_parallel import Wholes, is_parallel, split_model, tied_modules
from te_convert.runtime.mesh import Ranks, check_alike, find_ranks, fingerprint
from te_convert.verify.model import Parity
from te_convert.verify.tensor_parallel import compare_parallel

_ALIKE = "load the same checkpoint on every rank before convert"


def ranks_for(model: nn.Module, mesh: Any, given: Sequence[Scenario]) -> Ranks | None:
    """The ranks of ``tp_mesh``, which have the same model and the same inputs; None without a mesh.

    Raises:
        InputError: a mesh that cannot be used, a model that is divided already, or ranks that differ.
    """
    if mesh is None:
        return None
    ranks = find_ranks(mesh, model_device(model).type)
    divided = is_parallel(model)
    if any(ranks.all_of(divided)):
        raise InputError("the model is divided among tensor-parallel ranks already", "call te_convert.revert(model) first")
    check_alike(ranks, "the model's weights", fingerprint(model.state_dict().items() if _plain(model) else ()), _ALIKE)
    inputs = [pair for scenario in given for pair in iter_tensors((scenario.args, scenario.kwargs))]
    check_alike(ranks, "the example inputs", fingerprint(inputs), "pass the same example_inputs on every rank")
    return ranks


def _plain(model: nn.Module) -> bool:
    return all(hasattr(value, "numel") for value in model.state_dict().values())


def parallelize(
    model: nn.Module,
    original: Originals,
    captured: Capture,
    plan: Plan,
    parity: Parity,
    ranks: Ranks,
    scenarios: Sequence[Scenario],
    verify: bool,
    strict: bool,
) -> tuple[Plan, Parity]:
    """Divide a converted model in place, and compare it with itself before; put together again where that fails.

    Args:
        model: the converted model.
        original: the model before its conversion.
        captured: its recorded runs.
        plan: what was converted.
        parity: of the whole model.
        ranks: who shares it.
        scenarios: what is run for the comparison.
        verify: whether to compare at all.
        strict: raise where the divided model is not the whole one.

    Raises:
        ConversionError: ``strict``, and it is not.
        EnvironmentLacksError: the installed Transformer Engine does not take the arguments.
    """
    roles = find_roles(original, captured, plan, ranks.size, tied_modules(model))
    check_alike(ranks, "the roles of the modules", repr(roles), "this is a bug: please report it")
    if not roles.splits:
        note = f"tp_mesh: nothing could be divided among {ranks.size} ranks; every rank has the whole model"
        return _noted(roles.annotate(plan), note), parity

    def split() -> Wholes:
        return split_model(model, roles.splits, ranks.group, ranks.size, ranks.rank)

    note = _summary(roles, ranks)
    if not (verify and scenarios):
        split()
        return _noted(roles.annotate(plan), f"{note}; the divided model was not compared with the whole one"), parity
    verdicts = compare_parallel(model, scenarios, ranks, split)
    failed = next((verdict for verdict in verdicts if not verdict.passed), None)
    if failed is None:
        return _noted(roles.annotate(plan), note), replace(parity, scenarios=(*parity.scenarios, *verdicts))
    why = f"the divided model is not the whole one: {failed.name}: {failed.output}, {failed.figures.sqnr_db:.1f} dB"
    if strict:
        raise ConversionError(f"tp_mesh: {why}", "drop tp_mesh, or exclude what cannot be divided")
    divided = {split.fqn for split in roles.splits}
    sites = {d.fqn for d in plan.converting if d.fqn in divided or d.fused_into in divided}
    roles = Roles([], {**roles.replicated, **dict.fromkeys(sites, why)})
    return _noted(roles.annotate(plan), f"tp_mesh: {why}; every rank has the whole model"), parity


def _summary(roles: Roles, ranks: Ranks) -> str:
    count: Callable[[str], int] = [split.mode for split in roles.splits].count
    return (
        f"tp_mesh: divided among {ranks.size} ranks: {count('column')} column-parallel and {count('row')} row-parallel modules, "
        f"{count('pair')} MLPs, {count('heads')} attentions"
    )


def _noted(plan: Plan, note: str) -> Plan:
    return replace(plan, notes=(*plan.notes, note))
