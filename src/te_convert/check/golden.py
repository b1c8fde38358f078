"""Golden figures: what a check measured once, and whether it is still that good after an upgrade."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from te_convert.check.golden_rules import GRADIENTS, MODEL, SITE, Recorded, Slack, find_better, find_worse
from te_convert.check.model import CheckResult, Failure, GoldenVerdict, scenario_label
from te_convert.errors import InputError
from te_convert.report.format import clean, format_name
from te_convert.verify.gate import POOLED

GOLDEN_SCHEMA = 1
_RECORD = "record the figures with --update-golden"


@dataclass(frozen=True)
class Golden:
    """The contents of a golden file.

    Attributes:
        identity: what has to be the same for figures to be comparable: model_class, backend, dtype.
        versions: what ran when the figures were recorded, with the device.
        converted: names of the modules that ran on a replacement.
        scenarios: figures of each whole-model run by label.
        sites: figures of each TE module by name.
        modules: names of all TE modules, compared or not; not part of the file.
    """

    identity: dict[str, str]
    versions: dict[str, str | None]
    converted: tuple[str, ...]
    scenarios: dict[str, Recorded]
    sites: dict[str, Recorded]
    modules: frozenset[str] = frozenset()

    def to_json(self) -> str:
        """The file's text: in the order of the model, one line for each entry, so that a diff reads well."""
        data: dict[str, Any] = {
            "schema": GOLDEN_SCHEMA,
            **self.identity,
            "versions": self.versions,
            "converted": list(self.converted),
            "scenarios": {label: figures.to_dict() for label, figures in self.scenarios.items()},
            "sites": {fqn: figures.to_dict() for fqn, figures in self.sites.items()},
        }
        return "{\n" + ",\n".join(f" {json.dumps(key)}: {_lines(value)}" for key, value in data.items()) + "\n}\n"


def golden_of(result: CheckResult) -> Golden:
    """The figures of a check."""
    parity = result.parity
    return Golden(
        identity={"model_class": result.model_class, "backend": parity.backend, "dtype": result.dtype},
        versions={**result.versions, "device": parity.device},
        converted=result.converted,
        scenarios={
            scenario_label(run): Recorded.of(run.figures, run.error_ratio, run.dtype, judged=run.bound != POOLED)
            for run in parity.scenarios
        },
        sites={site.fqn: Recorded.of(site.figures, site.error_ratio, site.dtype) for site in parity.sites},
        modules=frozenset(parity.executed),
    )


def write_golden(path: Path, result: CheckResult) -> GoldenVerdict:
    """Record the figures of a check; the file is replaced as a whole or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(golden_of(result).to_json(), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise InputError(f"{path} cannot be written: {error.strerror or error}", "name another file") from error
    return GoldenVerdict(str(path), updated=True)


def read_golden(path: Path) -> Golden:
    """The golden file.

    Raises:
        InputError: missing, not JSON, an unknown schema, or damaged.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"the golden file {path} does not exist", _RECORD) from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"the golden file {path} cannot be read: {clean(error)}", f"restore it, or {_RECORD}") from None
    if not isinstance(data, dict) or "schema" not in data:
        raise InputError(f"{path} is no golden file", _RECORD)
    if data["schema"] != GOLDEN_SCHEMA:
        message = f"the golden file {path} has schema {data['schema']!r}; this version reads {GOLDEN_SCHEMA}"
        raise InputError(message, f"use the te_convert version that wrote it, or {_RECORD}")
    try:
        return _parse(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        message = f"the golden file {path} is damaged: {type(error).__name__}: {clean(error)}"
        raise InputError(message, f"restore it, or {_RECORD}") from None


def compare_golden(path: Path, golden: Golden, result: CheckResult) -> GoldenVerdict:
    """What got worse, what is missing and what changed since the figures were recorded.

    Raises:
        InputError: the file is of another model, backend or dtype, so that its figures say nothing about this one.
    """
    now = golden_of(result)
    for name, then in golden.identity.items():
        if then != now.identity[name] and result.converted:
            message = f"{path} records {name.replace('_', ' ')} {clean(then)}, and this is {clean(now.identity[name])}"
            raise InputError(message, f"give the file that belongs to this model, or {_RECORD}")
    failures = [*_lost_sites(golden, now), *_lost_figures(golden, now), *_worse(golden, now)]
    changes = {name: (golden.versions.get(name), now.versions.get(name)) for name in (*now.versions, *golden.versions)}
    return GoldenVerdict(
        str(path),
        compared=len(golden.scenarios) + len(golden.sites),
        failures=tuple(failures),
        better=tuple(_better(golden, now)),
        notes=tuple(_regrouped(golden, now)),
        changes={name: pair for name, pair in changes.items() if pair[0] != pair[1]},
    )


def _lost_sites(then: Golden, now: Golden) -> Iterator[Failure]:
    for fqn in then.converted:
        if fqn not in now.converted:
            yield Failure("golden", format_name(fqn), "not converted any more", "recorded as converted")


def _lost_figures(then: Golden, now: Golden) -> Iterator[Failure]:
    """Runs that did not happen, and sites that are what they were but were not compared."""
    for label in then.scenarios:
        if label not in now.scenarios:
            yield Failure("golden", clean(label), "not compared any more", "recorded as a scenario")
    for fqn in then.sites:
        if fqn not in now.sites and fqn in now.modules:
            yield Failure("golden", format_name(fqn), "not compared alone any more", "recorded with figures of its own")


def _regrouped(then: Golden, now: Golden) -> Iterator[str]:
    """TE modules that are none any more; whether their parts are converted is asked of the parts."""
    for fqn in then.sites:
        if fqn not in now.modules:
            yield f"{format_name(fqn)}: recorded as one TE module, and is none now"


def _worse(then: Golden, now: Golden) -> Iterator[Failure]:
    for name, old, new, slack in _pairs(then, now):
        found = find_worse(old, new, slack)
        if found is not None:
            yield Failure("golden", name, *found)


def _better(then: Golden, now: Golden) -> Iterator[str]:
    for name, old, new, slack in _pairs(then, now):
        words = find_better(old, new, slack)
        if words:
            yield f"{name}: {words}"
    for title, names in (
        ("converted", [fqn for fqn in now.converted if fqn not in then.converted]),
        ("compared", [label for label in now.scenarios if label not in then.scenarios]),
    ):
        yield from (f"{format_name(name)}: {title} now, not recorded" for name in names)


def _pairs(then: Golden, now: Golden) -> Iterator[tuple[str, Recorded, Recorded, Slack]]:
    for label, old in then.scenarios.items():
        if label in now.scenarios:
            yield clean(label), old, now.scenarios[label], GRADIENTS if "[gradients]" in label else MODEL
    for fqn, old in then.sites.items():
        if fqn in now.sites:
            yield format_name(fqn), old, now.sites[fqn], SITE


def _lines(value: Any) -> str:
    """JSON with one line for each entry of an outer object or list."""
    if isinstance(value, dict) and value:
        entries = [f"  {json.dumps(key)}: {json.dumps(entry, allow_nan=False)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(entries) + "\n }"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in value) + "\n ]"
    return json.dumps(value)


def _parse(data: Mapping[str, Any]) -> Golden:
    if not isinstance(data["converted"], list):
        raise TypeError("converted is no list")
    return Golden(
        identity={name: str(data[name]) for name in ("model_class", "backend", "dtype")},
        versions={str(name): None if value is None else str(value) for name, value in data["versions"].items()},
        converted=tuple(map(str, data["converted"])),
        scenarios={str(label): _recorded(entry) for label, entry in data["scenarios"].items()},
        sites={str(fqn): _recorded(entry) for fqn, entry in data["sites"].items()},
    )


def _recorded(entry: Mapping[str, Any]) -> Recorded:
    ratio = entry["error_ratio"]
    return Recorded(
        sqnr_db=_number(entry["sqnr_db"]),
        max_rel=_number(entry["max_rel"]),
        error_ratio=None if ratio is None else _number(ratio),
        dtype=str(entry["dtype"]),
        judged=bool(entry["judged"]),
    )


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"{value!r} is no figure")
    number = float(value)
    if math.isnan(number):
        raise ValueError("a figure is not a number")
    return number
