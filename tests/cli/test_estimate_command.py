from __future__ import annotations

import json

import pytest
from syrupy.assertion import SnapshotAssertion

from te_convert.cli.estimate import render_estimate
from te_convert.errors import InputError
from te_convert.estimate.gpus import find_gpu
from te_convert.estimate.kernels import Product
from te_convert.estimate.model import Estimate
from te_convert.estimate.predict import predict
from te_convert.estimate.work import Work
from tests.cli.conftest import Run
from tests.cli.fake_api import FakeApi


def sample() -> Estimate:
    large, thin = Product(16384, 4096, 4096), Product(16384, 256, 256)
    works = [Work(name, "te.Linear", "linear", products=(p,), te_products=(p,)) for name, p in (("[a]", large), ("thin", thin))]
    return predict(works, find_gpu("h100"), notes=("a [note]",))


def test_the_table(run: Run, api: FakeApi, snapshot: SnapshotAssertion) -> None:
    api.estimate_result = sample()
    result = run("estimate", "model.py", "--gpu", "h100")
    assert result.exit_code == 0
    assert result.stdout == snapshot
    assert api.calls["estimate"] == (
        ("the model", "its own inputs", "h100", None),
        {"mode": "training", "recipe": "all", "include": (), "exclude": (), "allow": ()},
    )


def test_options(run: Run, api: FakeApi) -> None:
    api.estimate_result = sample()
    args = ("--gpu", "b200", "--tokens", "4096", "--recipe", "mxfp8", "--inference", "--exclude", "x", "--json")
    result = run("estimate", "model.py", *args)
    assert json.loads(result.stdout) == api.estimate_result.to_dict()
    positional, named = api.calls["estimate"]
    assert positional[2:] == ("b200", 4096)
    assert (named["mode"], named["recipe"], named["exclude"]) == ("inference", "mxfp8", ("x",))


def test_quiet_is_the_verdict(run: Run, api: FakeApi) -> None:
    api.estimate_result = sample()
    verdict = api.estimate_result.verdict
    assert run("estimate", "model.py", "-q").stdout == f"{verdict.code}: {verdict.text}\n"


def test_an_unknown_gpu_is_told_before_the_model_is_opened(run: Run, api: FakeApi) -> None:
    api.raises["check_gpu"] = InputError("no figures for a GPU called 'x'", "name one of h100")
    result = run("estimate", "model.py", "--gpu", "x")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith("error: no figures for a GPU called 'x'\nhint: name one of h100\n")
    assert "open_model" not in api.calls


@pytest.mark.parametrize("args", [("--tokens", "0"), ("--recipe", "fp9"), ("--tokens", "x")])
def test_bad_options(args: tuple[str, ...], run: Run, api: FakeApi) -> None:
    assert run("estimate", "model.py", *args).exit_code == 2
    assert not api.calls


def test_convert_takes_the_policy(run: Run, api: FakeApi) -> None:
    run("model.py", "--out", "d", "--recipe", "fp8", "--policy", "benefit", "--gpu", "h100", "--tokens", "4096")
    named = api.calls["convert"][1]
    assert (named["policy"], named["gpu"], named["tokens"]) == ("benefit", "h100", 4096)
    run("model.py", "--out", "d")
    named = api.calls["convert"][1]
    assert (named["policy"], named["gpu"], named["tokens"]) == ("none", None, None)


def test_the_policy_needs_the_model_in_memory(run: Run, api: FakeApi) -> None:
    result = run("model.py", "--out", "d", "--stream", "--policy", "benefit")
    assert result.exit_code == 2
    assert "--policy, --gpu or --tokens cannot be used with --stream" in result.stderr


def test_colour() -> None:
    assert "\x1b[" in render_estimate(sample(), 100, True)
    assert "\x1b[" not in render_estimate(sample(), 100, False)
