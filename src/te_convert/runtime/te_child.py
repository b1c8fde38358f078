"""What a subprocess finds out about torch and Transformer Engine, one line of JSON for each step as soon as it is known.

This file is the whole program of that subprocess: it must work where every other package is broken, so it needs Python alone and
takes ``except BaseException`` as far as Python can.  What it cannot take, a crash or a hang, the parent sees by the lines that are
missing.  Torch is imported first, since Transformer Engine needs the libraries that torch loads.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

MARK = "te-convert-probe "
"""Begins the lines that count; torch and Transformer Engine may print others."""


_RECIPES = "transformer_engine.common.recipe"


def tell(step: str, action: Callable[[], Any]) -> bool:
    """Do a step and print its value, or the exception that ended it."""
    line: dict[str, Any] = {"step": step}
    try:
        line["value"] = action()
    except BaseException as error:  # a StopIteration or SystemExit of a broken package, too
        line["error"], line["message"] = type(error).__name__, str(error)
    sys.stdout.write(f"\n{MARK}{json.dumps(line, default=str)}\n")
    sys.stdout.flush()
    return "error" not in line


def torch_build() -> dict[str, Any]:
    """Version, CUDA version and C++ ABI of torch, and whether CUDA can be used; what this torch does not tell is None."""
    import torch

    cuda: Any = getattr(torch, "cuda", None)
    found: dict[str, Any] = {"version": str(getattr(torch, "__version__", "unknown"))}
    found["cuda"] = getattr(getattr(torch, "version", None), "cuda", None)
    found["cxx11_abi"] = _ask(lambda: bool(torch.compiled_with_cxx11_abi()))
    found["cudnn"] = _ask(lambda: torch.backends.cudnn.version())
    found["nccl"] = _ask(lambda: list(cuda.nccl.version()) if found["cuda"] else None)
    found["available"] = bool(_ask(lambda: cuda.is_available()))
    return found


def gpus() -> list[dict[str, Any]]:
    """Name, compute capability and memory in bytes of each GPU that torch sees."""
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        properties: Any = torch.cuda.get_device_properties(index)
        capability = [int(properties.major), int(properties.minor)]
        found.append({"name": str(properties.name), "capability": capability, "memory": int(properties.total_memory)})
    return found


def import_te() -> dict[str, Any]:
    """Whether ``transformer_engine.pytorch`` has its modules, since ``import transformer_engine`` succeeds without; its recipes."""
    import transformer_engine.pytorch as te

    recipes = _ask(lambda: [name for name in vars(importlib.import_module(_RECIPES)) if name.endswith("Scaling")])
    return {"linear": hasattr(te, "Linear"), "recipes": recipes or []}


def run_te() -> bool:
    """One bf16 product by ``te.Linear`` on the current GPU."""
    import torch
    import transformer_engine.pytorch as te

    layer = te.Linear(32, 32, params_dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        y = layer(torch.ones(32, 32, dtype=torch.bfloat16, device="cuda"))
    return bool(torch.isfinite(y).all())


def _ask(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except BaseException:
        return None


def main() -> None:
    """All steps; one that fails ends those that build on it."""
    if len(sys.argv) > 1:
        sys.path[:] = json.loads(sys.argv[1])
    if tell("torch", torch_build):
        seen = tell("gpus", gpus) if _ask(lambda: torch_build()["available"]) else False
        if tell("te", import_te) and seen:
            tell("kernel", run_te)


if __name__ == "__main__":
    main()
