"""An explanation for a terminal: the decision first, then what it rests on."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from te_convert.explain.model import Explanation, GraphLine, Trial
from te_convert.plan.model import Decision, Plan
from te_convert.plan.trace import Attempt
from te_convert.reasons import Reason
from te_convert.report.format import clean, format_name, format_shapes, plural
from te_convert.report.text import render_block

_SHOWN_READERS = 4
_MARKS = {"before": " ", "site": ">", "after": " "}


def render_explanation(found: Explanation, width: int = 100, color: bool = False) -> str:
    """The explanation as text of at most ``width`` columns; ANSI colours only with ``color=True``."""
    items: list[RenderableType] = [Text(_headline(found), "bold")]
    reasons = () if found.decision is None else found.decision.reasons
    sections: list[tuple[str, list[RenderableType]]] = [
        ("Reasons", [row for why in reasons for row in _reason(why, "  ")]),
        ("Seen", _pairs(_seen(found))),
        ("Reads the same input", _pairs((clean(name), clean(why)) for name, why in found.companions.items())),
        (
            "Rules, in the order in which they were asked",
            [row for attempt in found.attempts for row in _attempt(attempt, found.fqn)],
        ),
        ("Tried", [] if found.trial is None else _trial(found.trial)),
        (f"The recorded graph around it ({clean(found.scenario)})", _graph(found)),
        ("Notes", [_hanging("  - ", note) for note in found.notes]),
    ]
    for title, rows in sections:
        if rows:
            items += ["", Text(title, "bold"), *rows]
    return render_block(items, width, color)


def render_sites(plan: Plan, width: int = 100, color: bool = False) -> str:
    """Every site with its outcome, one line each."""
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(overflow="fold")
    for decision in plan:
        codes = ", ".join(dict.fromkeys(why.code for why in decision.reasons))
        what = f"{decision.replacement}" if decision.replacement else decision.kind
        table.add_row(decision.outcome.value, format_name(decision.fqn), f"{clean(what)}{f'  [{codes}]' if codes else ''}")
    return render_block([table], width, color)


def _headline(found: Explanation) -> str:
    name, decision = format_name(found.fqn), found.decision
    if decision is None:
        return f"{name}: no site of its own; it owns no parameters and no rule had anything to say about it"
    what = f"{name}: {decision.outcome}"
    if decision.fused_into is not None:
        return f"{what} into {format_name(decision.fused_into)} ({decision.replacement}) by the rule {decision.rule}"
    if decision.replacement is not None:
        return f"{what} to {decision.replacement} by the rule {decision.rule}"
    return f"{what} by the rule {decision.rule}" if decision.rule is not None else f"{what}: no rule takes it as it is"


def _seen(found: Explanation) -> Iterable[tuple[str, str]]:
    yield "class", clean(found.class_name)
    if found.aliases:
        yield "also called", clean(", ".join(found.aliases))
    for name, words in found.parameters.items():
        yield clean(name), clean(words)
    yield "calls", clean(", ".join(f"{count} in {name}" for name, count in found.calls.items()) or "no run was recorded")
    decision: Decision | None = found.decision
    if decision is not None and decision.shapes:
        yield "shapes", format_shapes(decision.shapes)
    if found.arguments:
        yield "arguments", clean(", ".join(found.arguments))
    if found.facts:
        yield "probe", clean(", ".join(f"{name} {value}" for name, value in found.facts.items()))
    if found.source:
        yield "input from", clean(found.source)
    if found.members:
        yield "fused", clean(", ".join(f"{role} {name}" for role, name in found.members))


def _attempt(attempt: Attempt, fqn: str) -> list[RenderableType]:
    others = [format_name(name) for name in attempt.about if name != fqn]
    about = f" (with {', '.join(others[:6])}{' …' if len(others) > 6 else ''})" if others and len(attempt.about) > 1 else ""
    about = f" (about {others[0]})" if others and len(attempt.about) == 1 else about
    words = f"{attempt.result}{about}" + (f": {clean(attempt.miss)}" if attempt.miss else "")
    rows: list[RenderableType] = [_hanging(f"  {attempt.rule:<20}", words)]
    return [*rows, *(row for why in attempt.reasons for row in _reason(why, " " * 22))]


def _reason(why: Reason, indent: str) -> list[RenderableType]:
    rows: list[RenderableType] = [_hanging(f"{indent}- ", f"{why.code}: {clean(why.detail)}")]
    return [*rows, _hanging(f"{indent}  hint: ", clean(why.hint))] if why.hint else rows


def _trial(trial: Trial) -> list[RenderableType]:
    on = "Transformer Engine" if trial.backend == "te" else "the reference twins"
    if trial.problem:
        return [_hanging("  ", f"not run on {on}: {clean(trial.problem)}")]
    ran = f"on {on}, in all recorded runs: {plural(trial.executed, 'time')} as one module"
    rows: list[RenderableType] = [_hanging("  ", f"{ran}, {plural(trial.fallbacks, 'time')} as written in the original")]
    return [*rows, *(_hanging("  - ", f"{clean(why)} ×{count}") for why, count in trial.why_not.items())]


def _graph(found: Explanation) -> list[RenderableType]:
    rows: list[RenderableType] = []
    site = [line for line in found.graph if line.place == "site"]
    for line in found.graph:
        rows.append(_hanging(f"  {_MARKS[line.place]} ", _node(line)))
        if found.hidden and line is site[len(site) // 2 - 1]:
            rows.append(Text(f"  > … {plural(found.hidden, 'more node')} of the module"))
    return rows


def _node(line: GraphLine) -> str:
    call = line.name if line.operation == "placeholder" else f"{line.name} = {line.operation}({', '.join(line.inputs)})"
    shape = "" if line.shape is None else f"{'×'.join(map(str, line.shape)) or 'scalar'} {line.dtype}"
    where = "" if line.operation in ("placeholder", "output") else f"in {format_name(line.where)}"
    more = "" if len(line.readers) <= _SHOWN_READERS else f" … and {len(line.readers) - _SHOWN_READERS} more"
    readers = f"read by {', '.join(line.readers[:_SHOWN_READERS])}{more}" if line.readers else ""
    return "; ".join(clean(part) for part in (call, shape, where, readers) if part)


def _pairs(pairs: Iterable[tuple[str, str]]) -> list[RenderableType]:
    rows = list(pairs)
    width = max((len(label) for label, _ in rows), default=0)
    return [_hanging(f"  {label:<{width}}  ", text) for label, text in rows]


def _hanging(label: str, text: str) -> Table:
    """A label and a text whose further lines align with its first."""
    grid = Table.grid()
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(label), Text(text))
    return grid
