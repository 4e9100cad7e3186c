"""Renders a run, or two, as one HTML file that needs neither a network nor other files."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from polytrain.text import strict_json
from polytrain.view.page.charts import Chart, charts_of, headlines_of, score_of
from polytrain.view.page.comparison import comparison, overlays_of
from polytrain.view.page.curves import MOST_UNDONE, digits
from polytrain.view.page.facts import Facts
from polytrain.view.page.timeline_chart import chart_of, coarse, drawn_marks
from polytrain.view.page.verdict import duration, verdict

if TYPE_CHECKING:
    from jinja2 import Environment

_UPLOT = "uPlot-1.6.32"

_LISTED = {
    "charts": 12,
    "metrics": 200,
    "ranks": 128,
    "checkpoints": 50,
    "attempts": 200,
    "files": 20,
    "nodes": 8,
    "programs": 20,
}
"""Rows of each table, of which the page's JSON has more, and charts that aren't folded."""


def page(facts: Facts, *, is_live: bool = False, refresh_s: float | None = None) -> str:
    """Return the page of a run.

    Args:
        facts: what it shows.
        is_live: whether it is served.
        refresh_s: seconds after which it fetches itself again; None if the run has ended.
    """
    charts, by_name = _charts(facts), {metric.name: metric for metric in facts.metrics}
    return _rendered(
        "page.html",
        as_json(facts),
        is_live=is_live,
        refresh_s=refresh_s,
        facts=facts,
        verdict=verdict(facts),
        chart=chart_of(facts),
        drawn=[(each.title, [by_name[name] for name in each.metrics]) for each in charts],
        lines=sum(len(each.metrics) for each in charts),
        headlines=headlines_of(facts.metrics, charts, facts.settings),
        most_undone=MOST_UNDONE,
    )


def comparison_page(first: Facts, second: Facts) -> str:
    """Return a page of two runs: what differs, and the curves of both over each other."""
    runs, found = (first, second), comparison(first, second)
    overlays = overlays_of(first, second)
    return _rendered(
        "comparison.html",
        strict_json.plain(
            {**asdict(found), "runs": found.names, "drawn": [asdict(each) for each in overlays]}
        ),
        runs=runs,
        verdicts=[verdict(run) for run in runs],
        comparison=found,
        longest_s=max(run.wall_s for run in runs) or 1.0,
        drawn=overlays,
    )


def as_json(facts: Facts) -> Mapping[str, Any]:
    """Return the facts as JSON can hold them.

    Spans and marks that are finer than a screen are merged. Numbers that aren't finite are null,
    with their places in `not_finite`.
    """
    shown = replace(
        facts,
        spans=tuple(coarse(facts.spans, facts.wall_s)),
        marks=tuple(drawn_marks(facts.marks, facts.wall_s)),
    )
    charts = [asdict(chart) for chart in _charts(facts)]
    return strict_json.plain({"verdict": verdict(facts), "charts": charts, **asdict(shown)})


def _charts(facts: Facts) -> tuple[Chart, ...]:
    names = [metric.name for metric in facts.metrics if metric.curve is not None]
    return charts_of(names, score_of(facts.settings)[0])


def _rendered(
    template: str,
    data: Mapping[str, Any],
    *,
    is_live: bool = False,
    refresh_s: float | None = None,
    **names: Any,
) -> str:
    """Return a page, with what it shows as JSON in it."""
    scripts = [_asset(f"vendor/{_UPLOT}.iife.min.js"), _asset("axis.js"), _asset("page.js")]
    if is_live:
        scripts.append(_asset("live.js"))
    styles = [_asset(f"vendor/{_UPLOT}.min.css"), _asset("page.css")]
    text = (
        _environment()
        .get_template(template)
        .render(
            data=_in_script(data),
            scripts=scripts,
            styles=styles,
            policy=_policy(scripts, styles, is_live=is_live),
            is_live=is_live,
            refresh_s=refresh_s,
            listed=_LISTED,
            **names,
        )
    )
    # A path may have bytes that aren't UTF-8, which no file of text can hold.
    return text.encode(errors="backslashreplace").decode()


def _in_script(data: Mapping[str, Any]) -> str:
    """The data as the content of a `<script>`, which no text in them can end."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), default=str)
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _policy(scripts: list[str], styles: list[str], *, is_live: bool) -> str:
    """The page's Content-Security-Policy: these scripts and styles, and no network.

    A page that is served may fetch itself again.
    """
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, scripts))}",
            f"style-src {' '.join(map(_hash, styles))}",
            *(["connect-src 'self'"] if is_live else []),
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@cache
def _asset(path: str) -> str:
    return files("polytrain.view.page").joinpath("assets", path).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        autoescape=True,
        loader=FunctionLoader(_asset),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "duration": duration,
        "time": _time,
        "number": _number,
        "among": _among,
        "command": shlex.join,
        "size": _size,
        "json": _json,
    }
    return environment


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _among(value: Any, spread: float) -> str:
    """A value with as many digits as it takes to tell it from others."""
    is_number = isinstance(value, float) and math.isfinite(value)
    return f"{value:.{digits(value, spread)}g}" if is_number else _number(value)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
