from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import te_convert
from te_convert.errors import EnvironmentLacksError, InputError, LoadError
from te_convert.testing import assert_check, assert_parity

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module]:
    original = net()
    return original, te_convert.convert(original, (X,)).model


def test_equal_models_pass_and_give_their_figures(pair: tuple[nn.Module, nn.Module]) -> None:
    original, converted = pair
    parity = assert_parity(original, converted, (X,))
    assert parity.passed
    assert len(parity.sites) == 2


def test_another_weight_fails_with_the_lines_of_the_report(pair: tuple[nn.Module, nn.Module]) -> None:
    original, converted = pair
    with torch.no_grad():
        converted.get_parameter("3.weight").mul_(1.001)
    with pytest.raises(AssertionError) as caught:
        assert_parity(original, converted, (X,))
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("parity FAILED on reference twins (cpu)")
    failing = [line for line in lines if line.startswith("scenario ")]
    assert failing[0].startswith("scenario inputs: SQNR ")
    assert all("; bound: " in line for line in failing)


def test_the_models_stay_as_they_are(pair: tuple[nn.Module, nn.Module]) -> None:
    original, converted = pair
    before = [copy.deepcopy(model.state_dict()) for model in pair]
    modes = [model.training for model in pair]
    assert_parity(original, converted, (X,))
    assert [model.training for model in pair] == modes
    for model, state in zip(pair, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_model_in_which_nothing_was_converted_fails() -> None:
    model = net()
    with pytest.raises(AssertionError, match="nothing was converted"):
        assert_parity(model, copy.deepcopy(model), (X,))


def test_without_inputs_there_is_nothing_to_assert(pair: tuple[nn.Module, nn.Module]) -> None:
    with pytest.raises(InputError, match="verify needs inputs"):
        assert_parity(*pair, None)


def test_golden_figures(pair: tuple[nn.Module, nn.Module], tmp_path: Path) -> None:
    golden = tmp_path / "golden.json"
    with pytest.raises(InputError, match="does not exist"):
        assert_parity(*pair, (X,), golden=golden)
    assert_parity(*pair, (X,), golden=golden, update_golden=True)
    assert_parity(*pair, (X,), golden=str(golden))
    data = json.loads(golden.read_text())
    data["converted"].append("4")
    golden.write_text(json.dumps(data))
    with pytest.raises(AssertionError, match="golden 4: not converted any more; bound: recorded as converted"):
        assert_parity(*pair, (X,), golden=golden)


def test_checks_of_a_file_and_of_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("from torch import nn\nmodel = nn.Sequential(nn.Linear(16, 8))\nexample_inputs = None\n")
    assert assert_check(file, inputs=(X,)).passed
    opened = te_convert.open_model(str(file))
    directory = te_convert.convert(opened.model, (X,)).save(tmp_path / "net_te", source=opened.source)
    assert assert_check(directory).passed
    (directory / "source" / "net.py").write_text("")
    with pytest.raises(LoadError, match="was changed"):
        assert_check(directory)


def test_a_check_that_converts_nothing_fails(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("from torch import nn\nmodel = nn.Sequential(nn.Conv2d(3, 4, 3))\n")
    with pytest.raises(AssertionError, match="nothing was converted"):
        assert_check(file, inputs=(torch.randn(1, 3, 8, 8),))


def test_a_backend_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    file = tmp_path / "net.py"
    file.write_text("from torch import nn\nmodel = nn.Sequential(nn.Linear(16, 8))\n")
    with pytest.raises(EnvironmentLacksError):
        assert_check(file, inputs=(X,), backend="te")
