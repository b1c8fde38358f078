"""doctor: facts about this machine with a verdict, the consequence and the fix for each.

Torch and Transformer Engine are asked in a subprocess (``probe.py``), so that this works where they do not import; nothing here
raises.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from te_convert.runtime import machine
from te_convert.runtime.causes import BY_CODE, MINIMUM_DRIVER, fill
from te_convert.runtime.packages import Packages
from te_convert.runtime.probe import TransformerEngineProbe, find_te, probe_transformer_engine, probed
from te_convert.runtime.recipes import CONDITIONS, why_recipe_fails

_MIN_CAPABILITY = (8, 0)  # TE 2.20's installation guide and check_bf16_support: Ampere
_MIN_GLIBC = (2, 28)  # tag of the wheels of transformer-engine-cu12 and -cu13 2.20: manylinux_2_28
_ON_TWINS = "Transformer Engine cannot run; conversion and verification work on the twins"


@dataclass(frozen=True)
class Check:
    """One fact.

    Attributes:
        name: what was looked at.
        ok: False when Transformer Engine, or the recipe asked for, would not run because of it; None for a fact that decides
            nothing.
        fact: what was seen.
        consequence: what it means.
        fix: the command or step that helps.
        code: stable code of what is wrong (``docs/doctor.md``), or "".
    """

    name: str
    ok: bool | None
    fact: str
    consequence: str = ""
    fix: str = ""
    code: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def doctor(recipe: str | None = None) -> list[Check]:
    """Facts about this machine with verdict, consequence and fix; never raises.

    Args:
        recipe: also judge whether this recipe would run here: a key of ``te_convert.config.RECIPES``.

    Raises:
        InputError: an unknown recipe.
    """
    from te_convert.config import ConvertConfig

    ConvertConfig(recipe=recipe)
    return run_checks(recipe)


def run_checks(recipe: str | None = None) -> list[Check]:
    """Every check, in reading order; a check that fails itself says so in its place."""
    probe = TransformerEngineProbe("doctor.internal", "the probe itself failed")
    try:
        probe = probe_transformer_engine()
    except (Exception, SystemExit) as error:
        probe = TransformerEngineProbe("doctor.internal", f"{type(error).__name__}: {error}")
    checks = [
        _guarded("system", lambda: _check_system(probe)),
        Check("python", None, f"{platform.python_version()} ({sys.executable})"),
        _guarded("torch", lambda: _check_torch(probe), needed=True),
        _guarded("cuDNN, NCCL", lambda: _check_libraries(probe)),
        _guarded("driver", lambda: _check_driver(probe)),
        _guarded("GPU", lambda: _check_gpu(probe), needed=True),
        _guarded("CUDA toolkit", _check_toolkit),
        _guarded("compiler", lambda: Check("compiler", None, machine.find_compiler() or "no C++ compiler found")),
        _guarded("TE packages", lambda: _check_packages(probe.packages)),
        _guarded("TE's needs", lambda: _check_needs(probe)),
        _guarded("Transformer Engine", lambda: _check_te(probe), needed=True),
        _guarded("recipes", lambda: _check_recipes(probe)),
    ]
    if recipe is not None:
        checks.append(_guarded(f"recipe {recipe}", lambda: _check_recipe(probe, recipe), needed=True))
    return checks


def te_would_run(checks: list[Check]) -> bool:
    """True when no check failed."""
    return all(check.ok is not False for check in checks)


def brief() -> dict[str, Any]:
    """The verdict for a report, of what is known without starting a process: ``te_would_run`` (None: not tried) and ``code``."""
    try:
        probe = probed()
        if probe is not None:
            code = probe.code or ("" if probe.torch.gpus else "torch.cpu-only" if probe.torch.cuda is None else "gpu.none")
            return {"te_would_run": not code, "code": code}
        import torch

        lacking = {"torch.cpu-only": torch.version.cuda is None, "te.absent": not find_te()}
        lacking["gpu.none"] = not torch.cuda.is_available()
    except Exception:  # a driver that makes torch raise
        return {"te_would_run": None, "code": "driver.broken"}
    code = next((code for code, is_so in lacking.items() if is_so), "")
    return {"te_would_run": False if code else None, "code": code}


def brief_checks() -> tuple[dict[str, Any], ...]:
    """:func:`brief` as a check for a report's page; nothing where it is not known whether TE runs."""
    found = brief()
    code, runs = str(found["code"]), found["te_would_run"]
    if runs is None and not code:
        return ()
    meaning = BY_CODE[code].meaning if code else "imports, and a kernel ran"
    consequence, fix = ("", "") if runs else (_ON_TWINS, "te-convert doctor")
    return (Check("Transformer Engine", runs, meaning, consequence, fix, code).to_dict(),)


def _guarded(name: str, look: Callable[[], Check], needed: bool = False) -> Check:
    try:
        return look()
    except (Exception, SystemExit) as error:
        fact = f"could not be looked at: {type(error).__name__}: {error}"
        return Check(name, False if needed else None, fact, BY_CODE["doctor.internal"].meaning, code="doctor.internal")


def _fails(
    name: str, code: str, fact: str, probe: TransformerEngineProbe, consequence: str = _ON_TWINS, ok: bool | None = False
) -> Check:
    fix = fill(BY_CODE[code].fix, probe.packages, probe.torch.cuda, probe.found)
    return Check(name, ok, fact, consequence, fix, code)


def _check_system(probe: TransformerEngineProbe) -> Check:
    glibc = machine.find_glibc()
    fact = f"{platform.system()} {platform.release()} {platform.machine()}" + (f", glibc {_dotted(glibc)}" if glibc else "")
    if probe.importable:
        return Check("system", None, fact)
    if platform.system() != "Linux":
        return _fails("system", "os.unsupported", fact, probe)
    if glibc is not None and glibc < _MIN_GLIBC:
        return _fails("system", "os.glibc-too-old", fact, probe)
    return Check("system", None, fact)


def _check_torch(probe: TransformerEngineProbe) -> Check:
    torch = probe.torch
    if probe.code in ("torch.absent", "torch.broken"):
        return _fails("torch", probe.code, probe.error, probe, "nothing works but this command")
    if torch.version is None:
        return Check("torch", False, f"not asked: {probe.error}", _ON_TWINS, code=probe.code)
    if torch.cuda is None:
        return _fails("torch", "torch.cpu-only", f"{torch.version}, built without CUDA", probe)
    abi = {True: ", C++11 ABI", False: ", old C++ ABI", None: ""}[torch.cxx11_abi]
    return Check("torch", True, f"{torch.version}, CUDA {torch.cuda}{abi}")


def _check_libraries(probe: TransformerEngineProbe) -> Check:
    cudnn, nccl = probe.torch.cudnn, probe.torch.nccl
    facts = [f"cuDNN {_cudnn(cudnn)}" if cudnn else "torch has no cuDNN", f"NCCL {_dotted(nccl)}" if nccl else "torch has no NCCL"]
    facts += [f"{name} {version}" for name, version in probe.packages.nvidia.items()]
    return Check("cuDNN, NCCL", None, ", ".join(facts))


def _check_driver(probe: TransformerEngineProbe) -> Check:
    driver, torch = machine.find_driver(), probe.torch
    fact = ", ".join(filter(None, (_dotted(driver.version) if driver.version else "none found", driver.error)))
    if torch.available:
        return Check("driver", None, fact)
    if driver.version is None:
        code = "driver.broken" if driver.error else "driver.absent"
        return _fails("driver", code, fact, probe)
    least = MINIMUM_DRIVER.get(int(torch.cuda.split(".")[0])) if torch.cuda else None
    if least is not None and driver.version[0] < least:
        return _fails("driver", "driver.too-old", f"{fact}; CUDA {torch.cuda} needs {least} or newer", probe)
    return _fails("driver", "driver.broken", fact, probe) if driver.error else Check("driver", None, fact)


def _check_gpu(probe: TransformerEngineProbe) -> Check:
    torch = probe.torch
    if torch.gpu_error:
        return _fails("GPU", "driver.broken", f"it cannot be queried: {torch.gpu_error}", probe)
    if not torch.gpus:
        return _fails("GPU", "gpu.none", "no CUDA device is available", probe)
    facts = [f"{gpu.name}, compute capability {_dotted(gpu.capability)}, {gpu.memory / 2**30:.0f} GiB" for gpu in torch.gpus]
    fact = "; ".join(f"{facts.count(each)}× {each}" if facts.count(each) > 1 else each for each in dict.fromkeys(facts))
    if min(gpu.capability for gpu in torch.gpus) < _MIN_CAPABILITY:
        return _fails("GPU", "gpu.too-old", fact, probe)
    return Check("GPU", True, fact)


def _check_toolkit() -> Check:
    found = machine.find_nvcc()
    if found:
        return Check("CUDA toolkit", None, f"nvcc {found}")
    return Check("CUDA toolkit", None, "no nvcc found", "transformer-engine-torch, which pip compiles, cannot be installed here")


def _check_packages(packages: Packages) -> Check:
    named = {"transformer-engine": packages.te, **packages.cores, "transformer-engine-torch": packages.extension}
    fact = ", ".join(f"{name} {version}" for name, version in named.items() if version) or "none installed"
    if len(packages.cores) > 1:
        what = BY_CODE["te.mixed-cuda"]
        return Check("TE packages", None, fact, what.meaning, fill(what.fix, packages, None), what.code)
    return Check("TE packages", None, fact)


def _check_needs(probe: TransformerEngineProbe) -> Check:
    found = [f"{name} {version}" for name, version in probe.packages.needs.items() if version]
    missing = [name for name, version in probe.packages.needs.items() if not version]
    fact = ", ".join(found) or "none installed"
    if not missing or probe.importable:
        return Check("TE's needs", None, fact)
    return Check("TE's needs", None, f"{fact}; not there: {', '.join(missing)}", "", f"pip install {' '.join(missing)}")


def _check_te(probe: TransformerEngineProbe) -> Check:
    version = f"version {probe.version or 'unknown'}"
    if probe.importable:
        return Check(
            "Transformer Engine", True, f"{version} imports" + (" and te.Linear runs on the GPU" if probe.computed else "")
        )
    if probe.code in ("torch.absent", "torch.broken", "doctor.internal", "driver.broken"):
        return Check("Transformer Engine", False, f"not tried: {probe.error}", _ON_TWINS, code=probe.code)
    consequence = f"{BY_CODE[probe.code].meaning}; the twins are used instead, with the same checkpoints"
    fact = probe.error if not probe.installed else f"{version} is installed and does not run: {probe.error}"
    return _fails("Transformer Engine", probe.code, fact, probe, consequence)


def _check_recipes(probe: TransformerEngineProbe) -> Check:
    if not probe.torch.gpus:
        return Check("recipes", None, "they depend on the GPU")
    lacking = {name: why for name in ("bf16", *CONDITIONS) if (why := why_recipe_fails(name, probe))}
    here = [name for name in ("bf16", *CONDITIONS) if name not in lacking]
    return Check("recipes", None, f"this GPU has {', '.join(here) or 'none'}", "; ".join(lacking.values()))


def _check_recipe(probe: TransformerEngineProbe, recipe: str) -> Check:
    name = f"recipe {recipe}"
    if not probe.torch.gpus:
        return _fails(name, "recipe.unavailable", "there is no GPU", probe, f"{recipe} does not run here")
    why = why_recipe_fails(recipe, probe)
    if why:
        return _fails(name, "recipe.unavailable", why, probe, f"{recipe} does not run here")
    if not probe.importable:
        return Check(name, False, "the GPU has it, Transformer Engine does not run", f"{recipe} does not run here", "", probe.code)
    return Check(name, True, "the GPU and Transformer Engine have it")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _cudnn(number: int) -> str:
    """9.12.0 for 91200, and 8.9.7 for 8907 (``cudnn_version.h``)."""
    major, rest = divmod(number, 10000 if number >= 90000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"
