"""Reports and plans as one self-contained HTML page: readable without scripts, nothing fetched, every value escaped."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from te_convert.plan.model import Plan
from te_convert.report.format import plural
from te_convert.report.model import Report
from te_convert.report.page import OUTCOME_WORDS, SEED_WORDS, Page, page_of_plan, page_of_report
from te_convert.report.tables import without_empty_columns
from te_convert.runtime.probe import distribution_version

TEMPLATE = "page.html.j2"
_FILES = (TEMPLATE, "parts.html.j2", "page.css", "page.js")


def render_html(report: Report) -> str:
    """The report as one HTML page that opens from disk, on a phone, on paper, and in light and dark."""
    return _render(page_of_report(report))


def render_plan_html(plan: Plan, command: str = "", estimate: Mapping[str, Any] | None = None) -> str:
    """A plan as one HTML page, with the command that made it and an estimate where there are any."""
    return _render(page_of_plan(plan, command, estimate))


@cache
def template_version() -> str:
    """The first 12 hex digits of the SHA-256 of the page's sources; every page carries it, so that a stale one can be told."""
    return hashlib.sha256("".join(_read(name) for name in _FILES).encode()).hexdigest()[:12]


def _render(page: Page) -> str:
    script = _read("page.js")
    return (
        _environment()
        .get_template(TEMPLATE)
        .render(
            p=page,
            s=page.summary,
            outcome_words=OUTCOME_WORDS,
            seed_words=SEED_WORDS,
            version=distribution_version("te-convert") or "source",
            template_version=template_version(),
            style=Markup(_read("page.css")),
            script=Markup(script),
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=DictLoader({name: _read(name) for name in _FILES if name.endswith(".j2")}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["plural"] = plural
    environment.filters["filled"] = without_empty_columns
    return environment


@cache
def _read(name: str) -> str:
    return resources.files("te_convert.report").joinpath("templates").joinpath(name).read_text(encoding="utf-8")
