"""Record the constructor signatures of Transformer Engine's releases, read from their sources without installing them.

``pip download --no-deps transformer-engine==VERSION`` gives wheels of Python sources; an archive of a source tree works as well::

    python scripts/record_te_signatures.py FOLDER     # with transformer_engine-VERSION*.whl or .zip

Writes ``tests/replacements/te_signatures.json``: for every class, its distinct signatures with the versions that have them.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

OUT = Path(__file__).parent.parent / "tests" / "replacements" / "te_signatures.json"
CLASSES = (
    "Linear",
    "LayerNorm",
    "RMSNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "GroupedLinear",
    "DotProductAttention",
    "MultiheadAttention",
    "TransformerLayer",
)
FUNCTIONS = ("autocast", "fp8_autocast", "checkpoint")
PLACES = re.compile(r"transformer_engine/pytorch/(module/\w+|attention(/[\w/]+)?|transformer|fp8|quantization|distributed)\.py")
ACTIVATIONS = "transformer_engine/pytorch/module/layernorm_mlp.py"
RECIPES = "transformer_engine/common/recipe/__init__.py"


def read_sources(archive: Path) -> Iterator[tuple[str, ast.Module]]:
    with zipfile.ZipFile(archive) as file:
        for name in sorted(file.namelist()):
            if PLACES.fullmatch(name) or name in (ACTIVATIONS, RECIPES):
                yield name, ast.parse(file.read(name))


def describe(function: ast.FunctionDef) -> str:
    """Arguments without ``self``, with blanks between; "=" ends one with a default, "*" and "**" begin the variadic ones."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    found = [argument.arg + ("=" if index >= required else "") for index, argument in enumerate(positional)]
    if arguments.vararg or arguments.kwonlyargs:
        found.append(f"*{arguments.vararg.arg if arguments.vararg else ''}")
    found += [a.arg + ("=" if default else "") for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        found.append(f"**{arguments.kwarg.arg}")
    return " ".join(name for name in found if name != "self")


def methods(node: ast.ClassDef) -> dict[str, str]:
    found = {item.name: describe(item) for item in node.body if isinstance(item, ast.FunctionDef)}
    return {name: found[key] for key, name in (("__init__", "init"), ("forward", "forward")) if key in found}


def read_release(archive: Path) -> dict[str, Any]:
    release: dict[str, Any] = {"activations": "", "recipes": ""}
    for name, tree in read_sources(archive):
        if name == RECIPES:
            release["recipes"] = " ".join(sorted(n.name for n in tree.body if isinstance(n, ast.ClassDef) and is_recipe(n)))
            continue
        if name == ACTIVATIONS:
            release["activations"] = " ".join(sorted(activation_names(tree)))
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and (node.name in CLASSES or node.name in FUNCTIONS):
                release.setdefault(node.name, methods(node))
            elif isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS:
                release.setdefault(node.name, {"call": describe(node)})
    return release


def is_recipe(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "Recipe" for base in node.bases)


def activation_names(tree: ast.Module) -> set[str]:
    """Keys of the dictionaries in the functions that look an activation up."""
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and "act_func" in n.name]
    dictionaries = [n for function in functions for n in ast.walk(function) if isinstance(n, ast.Dict)]
    keys = [key.value for d in dictionaries for key in d.keys if isinstance(key, ast.Constant)]
    return {key for key in keys if isinstance(key, str)}


def version_of(archive: Path) -> tuple[int, ...]:
    match = re.search(r"-(\d+(?:\.\d+)+)", PurePosixPath(archive).name)
    if match is None:
        raise SystemExit(f"{archive}: no version in the name")
    return tuple(int(part) for part in match[1].split("."))


def merge(releases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Equal descriptions once, with all versions that share them."""
    merged: dict[str, Any] = {"versions": list(releases)}
    for name in dict.fromkeys(name for release in releases.values() for name in release):
        entries: list[dict[str, Any]] = []
        for version, release in releases.items():
            described = release.get(name)
            same = next((entry for entry in entries if entry["is"] == described), None)
            if described is None:
                continue
            if same is None:
                entries.append({"versions": version, "is": described})
            else:
                same["versions"] += f" {version}"
        merged[name] = entries
    return merged


def main() -> int:
    archives = sorted((p for p in Path(sys.argv[1]).iterdir() if p.suffix in (".whl", ".zip")), key=version_of)
    releases = {".".join(map(str, version_of(p)[:2])): read_release(p) for p in archives}
    OUT.write_text(json.dumps(merge(releases), indent=1) + "\n", encoding="utf-8")
    print(f"{OUT.name}: {', '.join(releases)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
