"""Reports and plans as one self-contained HTML page: no scripts, nothing fetched, every value escaped."""

from __future__ import annotations

from functools import cache
from importlib import resources

from jinja2 import Environment, StrictUndefined, Template

from te_convert.plan.model import Plan
from te_convert.report.format import plural
from te_convert.report.model import Report
from te_convert.report.summary import Summary, summarise, summarise_plan

TEMPLATE = "template.html.j2"


def render_html(report: Report) -> str:
    """The report as one HTML page that opens from disk and reads in light and dark."""
    return _render(summarise(report))


def render_plan_html(plan: Plan) -> str:
    """A plan as one HTML page."""
    return _render(summarise_plan(plan))


def _render(summary: Summary) -> str:
    return _template().render(s=summary)


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["plural"] = plural
    source = resources.files("te_convert.report").joinpath(TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(source)
