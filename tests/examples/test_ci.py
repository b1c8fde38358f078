"""The files of examples/ci, copied as their page says, and every command in them run as a CI runner would."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CI = ROOT / "examples" / "ci"
COPIED = ("model.py", "test_parity.py", "golden.json")


def parsed(name: str) -> Any:
    """A YAML file; PyYAML comes with Transformers, and nothing else here needs it."""
    return pytest.importorskip("yaml").safe_load((CI / name).read_text(encoding="utf-8"))


def github_steps() -> list[dict[str, Any]]:
    (job,) = parsed("github-actions.yml")["jobs"].values()
    steps: list[dict[str, Any]] = job["steps"]
    return steps


def github_commands() -> list[str]:
    return [line for step in github_steps() for line in step.get("run", "").splitlines()]


def gitlab_commands() -> list[str]:
    job = parsed("gitlab-ci.yml")["parity"]
    commands: list[str] = [*job["before_script"], *job["script"]]
    return commands


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in COPIED:
        shutil.copy(CI / name, tmp_path)
    return tmp_path


def shell(command: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", **more}
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE", "PYTEST_ADDOPTS"):
        if name not in more:
            environment.pop(name, None)
    run = ["bash", "-euo", "pipefail", "-c", command]
    return subprocess.run(run, cwd=folder, env=environment, capture_output=True, encoding="utf-8", timeout=120, check=False)


def test_both_files_run_the_same_commands() -> None:
    assert github_commands() == gitlab_commands()
    installs = [command for command in gitlab_commands() if command.startswith("pip install ")]
    assert installs == gitlab_commands()[:2]
    assert all(command.split()[0] in ("te-convert", "pytest") for command in gitlab_commands()[2:])


def test_they_run_on_cpu_runners() -> None:
    (job,) = parsed("github-actions.yml")["jobs"].values()
    assert job["runs-on"] == "ubuntu-latest"
    assert "https://download.pytorch.org/whl/cpu" in github_commands()[0]
    assert "gpu" not in parsed("gitlab-ci.yml")["parity"].get("tags", [])
    assert job["env"]["TE_CONVERT"] == parsed("gitlab-ci.yml")["parity"]["variables"]["TE_CONVERT"]


@pytest.mark.slow
def test_every_command_passes(project: Path) -> None:
    summary = project / "summary.md"
    runner = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary), "GITHUB_WORKSPACE": str(project)}
    for command in github_commands()[2:]:
        done = shell(command, project, **runner)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        if " check " in command:
            assert re.search(r"^::notice file=(model\.py|build/model_te/manifest\.json),", done.stderr, re.MULTILINE)
    job = parsed("gitlab-ci.yml")["parity"]["artifacts"]
    reports = sorted(project.glob(job["reports"]["junit"]))
    assert [report.name for report in reports] == ["te-convert-directory.xml", "te-convert.xml"]
    assert all(ET.parse(report).getroot().get("failures") == "0" for report in reports)
    assert all((project / path).is_file() for path in job["paths"])
    assert summary.read_text(encoding="utf-8").count("### ✅ te-convert check ") == 2


def test_a_change_for_the_worse_fails_the_job(project: Path) -> None:
    """The model as it would be after an upgrade that keeps te_convert from converting a layer."""
    source = (project / "model.py").read_text()
    source = source.replace("self.head = nn.LayerNorm(WIDTH), nn.Linear(", "self.head = nn.LayerNorm(WIDTH), nn.Bilinear(WIDTH, ")
    source = source.replace("self.head(self.norm(x).mean(dim=1))", "self.head(self.norm(x).mean(dim=1), x[:, 0])")
    (project / "model.py").write_text(source)
    done = shell(github_commands()[2], project, GITHUB_ACTIONS="true")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "golden head: not converted any more; bound: recorded as converted" in done.stdout.splitlines()
    assert "::error file=model.py,title=te-convert%3A golden head::not converted any more; bound: recorded as converted" in (
        done.stderr.splitlines()
    )


def test_the_page_names_every_file_and_its_commands_exist() -> None:
    page = (CI / "README.md").read_text(encoding="utf-8")
    files = {path.name for path in CI.iterdir() if path.is_file()} - {"README.md"}
    assert files == set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))
    words = [shlex.split(line) for line in re.findall(r"^te-convert .*$", page, re.MULTILINE)]
    named = [word for line in words for word in line if word.endswith((".py", ".json"))]
    assert named
    assert all((ROOT / name).is_file() or (CI / name).is_file() for name in named)
    from te_convert.cli.check import check

    options = {option for parameter in check.params for option in parameter.opts}
    assert set(re.findall(r"--(?!te-convert)[a-z][a-z-]+", page)) <= {option for option in options if option.startswith("--")}


def test_the_page_states_the_slack_that_is_applied() -> None:
    from te_convert.verify.tolerance import GOLDEN_ENOUGH_DB, GOLDEN_MODEL_SLACK_DB, GOLDEN_SLACK_DB

    page = " ".join((CI / "README.md").read_text(encoding="utf-8").split())
    slack = f"{GOLDEN_SLACK_DB:g} dB at a site, {GOLDEN_MODEL_SLACK_DB:g} dB for the whole model"
    assert f"{slack}, and only below {GOLDEN_ENOUGH_DB:g} dB" in page
