"""Write the files of a new built-in rule: `make new-rule NAME=in_out`.

The rule leaves every module alone until its methods say otherwise, so that the checks pass from the start.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_RULE = '''"""{name} → te.Linear: say here what it looks like before and after."""

from __future__ import annotations

from te_convert.match.candidate import Candidate
from te_convert.reasons import Reason
from te_convert.replacements.specs import LinearSpec
from te_convert.rules.base import NearMiss, Rule
from te_convert.weights.ops import Move, WeightMap


class {cls}Rule(Rule[LinearSpec]):
    """Converts modules that compute ... ."""

    id = "{slug}"
    kind = "{cls}"

    def looks_like(self, site: Candidate) -> bool:
        """A cheap look at the structure."""
        return type(site.module).__name__ == "{cls}"

    def recognise(self, site: Candidate) -> LinearSpec | NearMiss | None:
        """Probe what the module computes; a NearMiss when it is almost this rule's case."""
        del site
        return None

    def check(self, site: Candidate, facts: LinearSpec) -> tuple[Reason, ...]:
        """Reasons beyond the guards that every rule has."""
        del site, facts
        return ()

    def build(self, site: Candidate, facts: LinearSpec) -> LinearSpec:
        """The replacement."""
        del site
        return facts

    def weights(self, site: Candidate, facts: LinearSpec) -> WeightMap:
        """Where the tensors go."""
        del site
        return WeightMap((Move("weight", "weight"), *((Move("bias", "bias"),) if facts.bias else ())))
'''

_TEST = '''"""{cls}Rule: what it converts, and what it leaves alone for which reason."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import te_convert


class {cls}(nn.Module):
    """What the rule is for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


def test_what_it_converts_computes_the_same() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential({cls}(), nn.ReLU()), torch.randn(3, 4)
    result = te_convert.convert(model, (x,), backend="reference")
    torch.testing.assert_close(result.model(x), model(x))
    # When recognise() is written: result.report.parity.passed, and the site's replacement.


def test_a_near_miss_is_left_alone() -> None:
    class Twice({cls}):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model, x = nn.Sequential(Twice()), torch.randn(3, 4)
    result = te_convert.convert(model, (x,), backend="reference")
    assert torch.equal(result.model(x), model(x))
    assert not result.converted
    # One case like this for each guard, with its exact reason code.
'''


def write_rule(root: Path, name: str) -> list[Path]:
    """Write rule and test, and add the rule to the registry; the files.

    Raises:
        ValueError: the name is no Python name in lower case, or the rule is there already.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"{name!r} is no name for a module: use lower-case letters, digits and _")
    rule, test = root / f"src/te_convert/rules/{name}.py", root / f"tests/rules/test_{name}.py"
    if rule.exists() or test.exists():
        raise ValueError(f"there is a rule {name!r} already")
    names = {"name": name, "slug": name.replace("_", "-"), "cls": "".join(part.capitalize() for part in name.split("_"))}
    registry = root / "src/te_convert/rules/registry.py"
    text = registry.read_text()
    imports = [line for line in text.splitlines() if line.startswith("from te_convert.rules.")]
    added = sorted([*imports, f"from te_convert.rules.{name} import {names['cls']}Rule"])
    text = text.replace("\n".join(imports), "\n".join(added))
    start = "BUILTIN_RULES: tuple[AnyRule, ...] = ("
    if "\n".join(added) not in text or start not in text:
        raise ValueError(f"{registry.name} is not as it was: add the rule by hand")
    registry.write_text(text.replace(start, f"{start}{names['cls']}Rule(), "))
    rule.write_text(_RULE.format(**names))
    test.write_text(_TEST.format(**names))
    return [rule, test, registry]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", help="a Python module's name, for instance in_out")
    try:
        written = write_rule(ROOT, parser.parse_args().name)
    except ValueError as error:
        print(f"new-rule: {error}", file=sys.stderr)
        return 2
    print("new-rule: wrote", *(path.relative_to(ROOT) for path in written))
    print("new-rule: now recognise(), then the cases of the test, then make check; CONTRIBUTING.md has the steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
