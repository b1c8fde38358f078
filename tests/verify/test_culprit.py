"""Sites that are right alone and wrong together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import te_convert
from te_convert.cli.main import main
from te_convert.reference.linear import Linear
from te_convert.rewrite.apply import apply_plan
from te_convert.rewrite.site import is_converted
from te_convert.verify import culprit
from te_convert.verify.model import Interaction
from tests.verify.model_zoo import perturb

WIDTH, SITES = 16, 10
X = (torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)),)
Forward = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]

SOURCE = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
def example_inputs():
    return (torch.ones(3, 16),)
"""


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return perturb(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(SITES))).eval())


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Forward], None]:
    """Another forward of all twins of Linears, given (module, input, right output); sites alone are run without it."""
    own = Linear.forward

    def change(wrong: Forward) -> None:
        def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            y = own(self, x, *args, **kwargs)
            return y if "forward" in self.__dict__ else wrong(self, x, y)

        monkeypatch.setattr(Linear, "forward", forward)

    return change


def together(net: nn.Module, *names: str) -> Forward:
    """The last of the named sites is wrong while all of them are converted."""

    def wrong(site: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        last = site is net.get_submodule(names[-1])
        return y * 1.01 if last and all(is_converted(net.get_submodule(name)) for name in names) else y

    return wrong


def convert(net: nn.Module, **options: Any) -> te_convert.Result:
    return te_convert.convert(net, X, backend="reference", fuse=False, inplace=True, **options)


@pytest.mark.parametrize("names", [("2", "8"), ("0", "9"), ("1", "5", "8")])
def test_a_planted_interaction_is_named_and_one_of_its_sites_is_put_back(
    names: tuple[str, ...], net: nn.Module, plant: Callable[[Forward], None]
) -> None:
    plant(together(net, *names))
    parity = convert(net, bisect=True).report.parity
    (found,) = parity.interactions
    assert (found.fqns, found.scenario, found.minimal) == (names, "inputs", True)
    assert 1e-3 < found.figures.max_rel < 2e-2
    assert found.runs <= 60
    (reverted,) = parity.reverted
    assert reverted.fqn in names
    assert f"wrong together with {', '.join(n for n in names if n != reverted.fqn)}" in reverted.why
    assert parity.passed
    assert len(parity.sites) == SITES - 1


def test_small_errors_that_add_up_over_three_sites_are_an_interaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is within the bound of a site, two are within the model's, three are not."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))).eval()
    own = Linear.forward

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        y = own(self, x, *args, **kwargs)
        return y * (1 + 9e-6) if any(self is net.get_submodule(name) for name in ("1", "3", "4")) else y

    monkeypatch.setattr(Linear, "forward", forward)
    parity = convert(net, bisect=True).report.parity
    (found,) = parity.interactions
    assert found.fqns == ("1", "3", "4")
    assert len(parity.reverted) == 1
    assert parity.passed


def test_sites_that_fail_with_two_others_cost_one_site(net: nn.Module, plant: Callable[[Forward], None]) -> None:
    """1 with 4, and 1 with 8: putting 1 back is enough, and no larger set passes."""
    one, other = together(net, "1", "4"), together(net, "1", "8")

    def wrong(site: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return one(site, x, other(site, x, y))

    plant(wrong)
    parity = convert(net, bisect=True).report.parity
    assert [site.fqn for site in parity.reverted] == ["1"]
    assert parity.passed


def test_without_bisect_the_site_where_it_shows_is_put_back(net: nn.Module, plant: Callable[[Forward], None]) -> None:
    plant(together(net, "2", "8"))
    parity = convert(net).report.parity
    assert [site.fqn for site in parity.reverted] == ["8"]
    assert "first diverging site of inputs" in parity.reverted[0].why
    assert not parity.interactions
    assert "interactions" not in parity.to_dict()
    assert parity.passed


def test_one_site_that_is_wrong_only_in_the_model_is_a_set_of_one(net: nn.Module, plant: Callable[[Forward], None]) -> None:
    plant(together(net, "6"))
    parity = convert(net, bisect=True).report.parity
    assert parity.interactions[0].fqns == ("6",)
    assert [site.fqn for site in parity.reverted] == ["6"]
    assert "the only site" in parity.reverted[0].why


def test_a_search_that_runs_out_says_that_its_set_may_not_be_the_smallest(
    net: nn.Module, plant: Callable[[Forward], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(culprit, "MAX_RUNS", 4)
    plant(together(net, "0", "9"))
    parity = convert(net, bisect=True).report.parity
    found = parity.interactions[0]
    assert {"0", "9"} < set(found.fqns)
    assert not found.minimal
    assert "the search ended after" in parity.reverted[0].why
    assert parity.passed


def test_verify_names_the_set_and_leaves_the_model(net: nn.Module, plant: Callable[[Forward], None]) -> None:
    original = torch.nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(SITES))).eval()
    original.load_state_dict(net.state_dict())
    converted = convert(net).model
    plant(together(net, "2", "8"))
    plain = te_convert.verify(original, converted, X)
    assert (plain.status, plain.interactions) == ("failed", ())
    parity = te_convert.verify(original, converted, X, bisect=True)
    assert parity.status == "failed"
    assert [found.fqns for found in parity.interactions] == [("2", "8")]
    assert not parity.reverted
    assert any("no other site than 2, 8" in note for note in parity.notes)
    with torch.no_grad():
        converted.get_submodule("0").get_parameter("weight")[0] += 1
    changed = te_convert.verify(original, converted, X, bisect=True)
    assert not changed.interactions
    assert any("no set of sites" in note for note in changed.notes)


def test_a_right_conversion_makes_no_search(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(culprit._Search, "failure", None)
    assert convert(net, bisect=True).report.parity.passed


def test_an_interaction_is_plain_json() -> None:
    figures = te_convert.Parity("failed", "reference").to_dict()
    assert "interactions" not in figures
    found = Interaction(("a", "b"), "inputs", culprit_figures(), "a bound", 7, minimal=True)
    data = json.loads(json.dumps(te_convert.Parity("failed", "reference", interactions=(found,)).to_dict()))
    assert data["interactions"][0]["fqns"] == ["a", "b"]
    assert data["interactions"][0]["sqnr_db"] == 40.0


def culprit_figures() -> Any:
    from te_convert.verify.model import Figures

    return Figures(40.0, 0.01, bit_equal=False, numel=8)


def test_check_names_the_set_on_the_command_line(plant: Callable[[Forward], None], tmp_path: Path) -> None:
    """Every second call of a Linear is wrong, if the one before it was converted as well."""
    file = tmp_path / "net.py"
    file.write_text(SOURCE)
    last: list[Any] = [None]

    def wrong(site: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        after_another = last[0] is not None and last[0].data_ptr() == x.data_ptr()
        last[0] = y
        return y * 1.01 if after_another else y

    plant(wrong)
    answer = CliRunner().invoke(main, ["check", str(file), "--backend", "reference", "--bisect", "--json"])
    assert answer.exit_code == 3, answer.output
    assert "wrong together with" in answer.output


# ---- accuracy over all low-precision runs ------------------------------------------------------------------------------------
def inaccurate(net: nn.Module, *names: str) -> Forward:
    """The outputs of these sites are some roundings too large: right in float32."""

    def coarse(site: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y * (1 + 16 * torch.finfo(y.dtype).eps) if any(site is net.get_submodule(name) for name in names) else y

    return coarse


@pytest.mark.parametrize("names", [("6",), ("5", "8")])
@pytest.mark.parametrize("bisect", [False, True])
def test_lost_accuracy_is_traced_to_its_sites(
    names: tuple[str, ...], bisect: bool, net: nn.Module, plant: Callable[[Forward], None]
) -> None:
    plant(inaccurate(net, *names))
    parity = convert_low(net, bisect=bisect)
    assert {site.fqn for site in parity.reverted} == set(names)
    assert all("error ratio" in site.why and "draws" in site.why for site in parity.reverted)
    assert parity.passed
    assert len(parity.sites) == SITES - len(names)


def test_a_slow_model_s_lost_accuracy_is_not_searched(
    net: nn.Module, plant: Callable[[Forward], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("te_convert.verify.reference.SLOW_S", -1.0)
    plant(inaccurate(net, "6"))
    parity = convert_low(net)
    assert len(parity.reverted) == SITES
    assert all("no single site explains it: all runs together has error ratio" in site.why for site in parity.reverted)


def test_accuracy_that_the_original_modules_lack_too_is_not_drawn_afresh(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook added by the rewrite stays where the original modules are put back, and fresh draws would compare it with itself."""

    def breaks(target: nn.Module, *args: Any) -> Any:
        applied = apply_plan(target, *args)
        applied.sites["6"].register_forward_hook(lambda module, _, y: y * (1 + 16 * torch.finfo(y.dtype).eps))
        return applied

    monkeypatch.setattr("te_convert.pipeline.apply_plan", breaks)
    parity = convert_low(net)
    assert len(parity.reverted) == SITES
    assert all("no single site explains it" in site.why for site in parity.reverted)


def convert_low(net: nn.Module, **options: Any) -> Any:
    """In bf16, with enough rows that a ratio means something."""
    return te_convert.convert(
        net.bfloat16(),
        (X[0].repeat(64, 1).view(8, 24, WIDTH).bfloat16(),),
        backend="reference",
        fuse=False,
        inplace=True,
        **options,
    ).report.parity
