"""Write the two example reports: SmolLM2-135M, which is a Llama, and MiniLM, both with real weights and an emulated FP8 recipe."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the installed packages

import te_convert

if TYPE_CHECKING:
    from te_convert.report.model import Report

HERE = Path(__file__).parent
RECIPE = "fp8-current"


def _module(example: str, file: str) -> ModuleType:
    """A file of another example."""
    spec = importlib.util.spec_from_file_location(f"{example}_{file}", HERE.parent / example / f"{file}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _llama() -> tuple[Any, Any]:
    example = _module("smollm2", "model")
    return example.build_model(), example.example_inputs()


def _minilm() -> tuple[Any, Any]:
    from transformers import AutoModel

    example = _module("minilm", "run")
    folder = example.model_dir()
    return AutoModel.from_pretrained(folder, local_files_only=True).eval(), dict(example.tokenize(folder))


MODELS = {"llama": _llama, "minilm": _minilm}


def build(name: str) -> Report:
    """Convert an example's model on the twins; the report without the times, which differ from run to run."""
    model, inputs = MODELS[name]()
    _, report = te_convert.convert(model, inputs, recipe=RECIPE, backend="reference", inplace=True)
    return replace(report, timings_s={}, command=f"python examples/reports/make.py {name}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(MODELS)} (default: both)")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write to (default: beside this file)")
    chosen = parser.parse_args(argv)
    for name in chosen.names or MODELS:
        if name not in MODELS:
            parser.error(f"there is no report {name!r}; there are {', '.join(MODELS)}")
        page = build(name).to_html()
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / f"{name}.html").write_text(page, encoding="utf-8")
        print(f"wrote {chosen.out / f'{name}.html'} ({len(page.encode()) / 1000:.0f} kB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
