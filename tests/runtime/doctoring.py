"""doctor's checks for a probe and a machine that a test makes up."""

from __future__ import annotations

from typing import Any

import pytest

from te_convert.runtime import doctor, machine
from te_convert.runtime.doctor import Check
from te_convert.runtime.machine import Driver
from te_convert.runtime.probe import Gpu, TorchFacts, TransformerEngineProbe

RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling")


def checks_of(
    probe: TransformerEngineProbe, recipe: str | None = None, driver: Driver | None = None, glibc: tuple[int, ...] | None = (2, 36)
) -> list[Check]:
    """No tool of the machine is started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "probe_transformer_engine", lambda: probe)
        patch.setattr(machine, "find_driver", lambda: driver or Driver((580, 65)))
        patch.setattr(machine, "find_glibc", lambda: glibc)
        patch.setattr(machine, "find_nvcc", lambda: "")
        patch.setattr(machine, "find_compiler", lambda: "")
        return doctor.run_checks(recipe)


def on(*capabilities: tuple[int, int], code: str = "", cuda: str | None = "13.0", **more: Any) -> TransformerEngineProbe:
    """A machine with such GPUs."""
    gpus = tuple(Gpu("a GPU", capability, 80 * 2**30) for capability in capabilities)
    torch = TorchFacts("2.14.1", cuda, True, 91200, (2, 30, 4), bool(gpus), gpus)
    return TransformerEngineProbe(code, torch=torch, recipes=RECIPES, **more)
