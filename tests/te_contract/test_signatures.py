"""The recorded signatures of the installed release are those of its real classes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest

from te_convert.reference.activations import ACTIVATION_NAMES
from te_convert.replacements.build import why_not_built
from te_convert.replacements.specs import LayerNormMLPSpec
from tests.replacements import te_releases
from tests.te_contract.te_on_cpu import needs_te, te_on_cpu
from tests.te_contract.test_modules import SPECS

pytestmark = needs_te


@pytest.fixture(autouse=True)
def te() -> Iterator[Any]:
    with te_on_cpu() as package:
        yield package


@pytest.mark.parametrize("name", [name for name in te_releases.RECORDED if name[0].isupper()])
def test_recorded_and_real_signatures_agree(name: str, te: Any) -> None:
    version = ".".join(metadata.version("transformer-engine").split(".")[:2])
    if version not in te_releases.VERSIONS:
        pytest.skip(f"Transformer Engine {version} is not recorded")
    recorded = te_releases.described(name, version)
    for method in recorded:
        real = getattr(getattr(te, name), "__init__" if method == "init" else method)
        expected = te_releases.signature(recorded[method]).parameters
        found = inspect.signature(real).parameters
        assert list(found) == list(expected)
        assert [p.default is p.empty for p in found.values()] == [p.default is p.empty for p in expected.values()]


def test_the_installed_release_builds_every_spec() -> None:
    assert [why for spec in SPECS if (why := why_not_built(spec, "te"))] == []


def test_an_activation_that_te_does_not_have_is_found_out() -> None:
    for name, known in (*((name, True) for name in ACTIVATION_NAMES), ("tanh", False)):
        spec = LayerNormMLPSpec(32, 48, True, 1e-6, "LayerNorm", name, False, "float32")
        assert (why_not_built(spec, "te") == "") is known
