"""An exception in any stage leaves the caller's model and the random state bit for bit as they were, in place or not."""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any

import pytest
import torch

import te_convert
from te_convert import pipeline
from tests.invariants.test_states import look
from tests.invariants.variants import X, block
from tests.rewrite.rewrite_samples import contents

STAGES = {
    "copy": ("copy", "deepcopy"),
    "observe": (pipeline, "observe"),
    "capture": (pipeline, "capture"),
    "derive": (pipeline, "padded_variants"),
    "facts": ("te_convert.match.norms", "probe_norm_cached"),
    "linears": ("te_convert.match.linears", "probe_linear_cached"),
    "plan": (pipeline, "make_plan"),
    "reference": (pipeline, "record_reference"),
    "build": ("te_convert.rewrite.apply", "new_module"),
    "fused build": ("te_convert.rewrite.fuse", "new_module"),
    "parameters": ("te_convert.rewrite.fuse", "fill_parameters"),
    "lend": ("te_convert.rewrite.fuse", "_lend_all"),
    "register": ("te_convert.rewrite.fuse", "_register"),
    "watch scope": ("te_convert.rewrite.fuse", "watch_scope"),
    "watch": ("te_convert.rewrite.apply", "watch_root"),
    "verify": (pipeline, "verify_applied"),
    "isolate": ("te_convert.verify.gate", "_isolate"),
    "compare": ("te_convert.verify.gate", "compare_all"),
    "report": (pipeline, "report_of"),
}


def plant(monkeypatch: pytest.MonkeyPatch, stage: str, error: type[BaseException]) -> list[str]:
    """Let a function raise after it has done its work; the list says that it was reached."""
    place, name = STAGES[stage]
    module = importlib.import_module(place) if isinstance(place, str) else place
    own, reached = getattr(module, name), []

    def planted(*args: Any, **kwargs: Any) -> Any:
        own(*args, **kwargs)
        reached.append(name)
        raise error("planted")

    monkeypatch.setattr(module, name, planted)
    return reached


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("stage", STAGES)
def test_the_model_is_as_it_was(stage: str, error: type[BaseException], inplace: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if inplace and stage == "copy":
        pytest.skip("nothing is copied")
    model = block()
    model(X).sum().backward()
    before, whole, random = contents(model), look(model), torch.get_rng_state()
    reached = plant(monkeypatch, stage, error)
    result = None
    with suppress(error):
        result = te_convert.convert(model, (X,), inplace=inplace)
    monkeypatch.undo()
    assert reached
    assert torch.equal(torch.get_rng_state(), random)
    if result is not None and inplace and result.converted:  # a probe that fails costs its sites alone
        return
    assert contents(model) == before
    if not inplace:
        assert look(model) == whole
    assert te_convert.convert(model, (X,)).report.parity.passed
