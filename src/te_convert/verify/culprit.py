"""Which sites make the model as a whole fail, when each of them alone is right?"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from te_convert.verify.isolate import as_original
from te_convert.verify.model import Interaction, ScenarioParity
from te_convert.verify.reference import Expected
from te_convert.verify.state import State, put_back
from te_convert.verify.whole import ALL_RUNS, compare_accuracy, compare_one, measured

MAX_RUNS = 128
"""Comparisons that one search for a set of sites may make.  A pair among 100 sites takes about 30."""


def revert_culprit(state: State, scenarios: list[ScenarioParity], bisect: bool) -> None:
    """Put back one site that makes the model fail, or all when no set of sites explains it.

    Without ``bisect`` it is the first site in module order after which the model fails, which bisection over prefixes finds.
    """
    found = _search(state, scenarios)
    if found is None or not found.worth_it():  # something about the replacement itself
        revert_everything(state, scenarios)
    elif bisect:
        interaction = found.smallest()
        if interaction is None:
            revert_everything(state, scenarios)
            return
        state.interactions.append(interaction)
        fqn = found.sufficient(interaction.fqns)
        others = [name or "the root" for name in interaction.fqns if name != fqn]
        put_back(state, fqn, _words(interaction, others))
    else:
        failed = next(s for s in scenarios if not s.passed)
        put_back(state, found.first(), f"first diverging site of {failed.name}: {measured(failed)}, {failed.bound}")


def explain(state: State, scenarios: list[ScenarioParity]) -> None:
    """Name the smallest set of sites that fails, and put nothing back."""
    search = _search(state, scenarios)
    if search is None or not state.applied.sites:
        return
    interaction = search.smallest() if search.worth_it() else None
    if interaction is None:
        state.notes.append(f"{search.name}: bisection found no set of sites that explains the failure")
        return
    state.interactions.append(interaction)
    names = ", ".join(name or "the root" for name in interaction.fqns)
    state.notes.append(f"{search.name} fails with no other site than {names} converted ({_figures(interaction)})")


def revert_everything(state: State, scenarios: list[ScenarioParity]) -> None:
    """Put every site back."""
    failed = next((s for s in scenarios if not s.passed), None)
    figures = "" if failed is None else f": {failed.name} has {measured(failed)}, {failed.bound}"
    for fqn in list(state.applied.sites):
        put_back(state, fqn, f"the model as a whole failed and no single site explains it{figures}")


def _words(found: Interaction, others: Sequence[str]) -> str:
    if not others:
        return f"bisection: the only site without which {found.scenario} passes; with it alone {_figures(found)}"
    least = "" if found.minimal else f" (perhaps a smaller set: the search ended after {found.runs} runs)"
    return f"bisection: wrong together with {', '.join(others)}{least}; these alone in {found.scenario}: {_figures(found)}"


def _figures(found: Interaction) -> str:
    return f"SQNR {found.figures.sqnr_db:.1f} dB, max rel {found.figures.max_rel:.1e}, {found.bound}"


def _search(state: State, scenarios: list[ScenarioParity]) -> _Search | None:
    """A search with the first run that failed, else with the accuracy over all low-precision runs; None when neither failed.

    The accuracy of a slow model is not searched: each look at it takes dozens of runs.
    """
    names = {(s.name, s.perturbed) for s in scenarios if not s.passed}
    expected = next((r for r in state.reference.runs if (r.scenario.name, r.setting.perturb) in names), None)
    pooled = any(name == ALL_RUNS for name, _ in names) and not state.reference.frugal
    return _Search(state, expected) if expected is not None or pooled else None


class _Search:
    """Runs of one scenario, or of all in low precision (``expected`` None), with some sites converted and the rest as they were."""

    def __init__(self, state: State, expected: Expected | None) -> None:
        self.state, self.expected, self.names = state, expected, list(state.applied.sites)
        self.name = ALL_RUNS if expected is None else expected.scenario.name
        self.runs = 0
        self.missed: dict[frozenset[str], ScenarioParity | None] = {}

    def failure(self, converted: Sequence[str]) -> ScenarioParity | None:
        """The comparison that fails with these sites converted, if one does; each set is run once."""
        key = frozenset(converted)
        if key not in self.missed:
            self.runs += 1
            off = [name for name in self.names if name not in key]
            with as_original(self.state.applied, off) as root:
                results = self._compare(root, off)
            self.missed[key] = next((s for s in results if not s.passed), None)
        return self.missed[key]

    def _compare(self, root: nn.Module, off: Sequence[str]) -> list[ScenarioParity]:
        if self.expected is None:
            return compare_accuracy(self.state, root)
        return compare_one(self.state, self.expected, root, off)

    def worth_it(self) -> bool:
        """Whether the run passes with no site converted."""
        return self.failure([]) is None

    def first(self) -> str:
        """The site with which the run begins to fail, converting one after the other in module order."""
        low, high = 0, len(self.names)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.failure(self.names[:middle]) is None else (low, middle)
        return self.names[high - 1]

    def smallest(self) -> Interaction | None:
        """A set of sites that fails and of which no site can be left out (delta debugging); None when all together pass."""
        failing = self.names
        if self.failure(failing) is None:
            return None
        parts = 2
        while len(failing) > 1 and self.runs < MAX_RUNS:
            size = -(-len(failing) // parts)
            chunks = [failing[start : start + size] for start in range(0, len(failing), size)]
            rests = [[name for name in failing if name not in chunk] for chunk in chunks]
            smaller = next((one for one in (*chunks, *rests) if self._fails(one)), None)
            if smaller is not None:
                parts = 2 if smaller in chunks else max(parts - 1, 2)
                failing = smaller
            elif size == 1:
                break
            else:
                parts = min(2 * parts, len(failing))
        minimal = all(self.missed.get(frozenset(failing) - {name}, self) is None for name in failing)
        failed = self.failure(failing)
        assert failed is not None
        bound = failed.bound if failed.error_ratio is None else f"{measured(failed)}, {failed.bound}"
        return Interaction(tuple(failing), failed.name, failed.figures, bound, self.runs, minimal)

    def _fails(self, converted: Sequence[str]) -> bool:
        known = frozenset(converted) in self.missed
        return (known or self.runs < MAX_RUNS) and self.failure(converted) is not None

    def sufficient(self, names: Sequence[str]) -> str:
        """The site without which all others pass together, so that most stay converted; else the last in module order."""
        for name in reversed(names):
            if self.failure([other for other in self.names if other != name]) is None:
                return name
        return names[-1]
