"""A stand-in for ``te_convert.api`` that records its calls, so that the command line is tested alone."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from te_convert.plan.model import Plan
from te_convert.report.model import Report
from te_convert.runtime.doctor import Check
from tests.report.sample_reports import bert_plan, success


@dataclass
class Opened:
    model: str = "the model"
    example_inputs: Any = "its own inputs"
    source: str = "the source"


@dataclass
class Result:
    report: Report
    model: str = "converted model"

    @property
    def plan(self) -> Plan:
        return bert_plan()

    @property
    def converted(self) -> bool:
        return self.report.converted


@dataclass
class FakeApi:
    """What the functions return or raise, and what they were called with."""

    report: Report = field(default_factory=success)
    estimate_result: Any = None
    checks: list[Check] = field(default_factory=list)
    raises: dict[str, BaseException] = field(default_factory=dict)
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    def _called(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.calls[name] = (args, kwargs)
        self.order.append(name)
        print(f"the model's code prints in {name}")  # noqa: T201
        if name in self.raises:
            raise self.raises[name]

    def check_out(self, *args: Any, **kwargs: Any) -> None:
        self._called("check_out", *args, **kwargs)

    def parse_inputs(self, *args: Any, **kwargs: Any) -> Any:
        self._called("parse_inputs", *args, **kwargs)
        return ((), {"parsed": True})

    def open_model(self, *args: Any, **kwargs: Any) -> Opened:
        self._called("open_model", *args, **kwargs)
        return Opened()

    def convert(self, *args: Any, **kwargs: Any) -> Result:
        self._called("convert", *args, **kwargs)
        if kwargs["progress"] is not None:
            kwargs["progress"]("verify [bold]", 1, 2)
            kwargs["progress"]("verify [bold]", 2, 2)
        return Result(self.report)

    def analyze(self, *args: Any, **kwargs: Any) -> Plan:
        self._called("analyze", *args, **kwargs)
        return bert_plan()

    def check_gpu(self, *args: Any) -> str:
        self._called("check_gpu", *args)
        return "h100"

    def estimate(self, *args: Any, **kwargs: Any) -> Any:
        self._called("estimate", *args, **kwargs)
        return self.estimate_result

    def save(self, result: Result, out: Path, **kwargs: Any) -> Path:
        self._called("save", result, out, **kwargs)
        return out

    def doctor(self) -> list[Check]:
        self._called("doctor")
        return self.checks

    def install(self, monkeypatch: Any) -> FakeApi:
        """Put the stand-in where the commands import ``te_convert.api`` from."""
        import te_convert

        module = ModuleType("te_convert.api")
        for name in ("check_out", "parse_inputs", "open_model", "convert", "analyze", "estimate", "check_gpu", "save", "doctor"):
            setattr(module, name, getattr(self, name))
        monkeypatch.setitem(sys.modules, "te_convert.api", module)
        monkeypatch.setattr(te_convert, "api", module, raising=False)
        return self
