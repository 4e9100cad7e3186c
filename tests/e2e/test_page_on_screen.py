"""A run's page on a screen, on paper and while the run is active, in a browser."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.browser import BROWSER, Browser, browser, opened
from tests.e2e.test_page_in_browser import WITHOUT_NETWORK, can_be_cut_off
from tests.unit.record.lines import entry_of
from tests.unit.record.recorded import RUN, journal
from tests.unit.view.page_facts import facts

from polytrain.run.lease import leased
from polytrain.storage.location import Location
from polytrain.view.page import serving
from polytrain.view.page.rendering import comparison_page, page
from polytrain.view.present import RunRecord

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no chromium is installed"),
    pytest.mark.skipif(not can_be_cut_off(), reason="network namespaces aren't allowed here"),
]

WORD = "w" * 300
DRAWN = "document.documentElement.dataset.charts"
PHONE = {"width": 390, "height": 844}
SCREEN = {"width": 1280, "height": 800}
LINES = b"".join(journal(RUN)).splitlines(keepends=True)
FINITE = st.floats(allow_nan=False, allow_infinity=False)


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser(WITHOUT_NETWORK) as made:
        yield made


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with training and validation, and a restart."""

    def fill(record: RunRecord) -> None:
        for step in range(1, 101):
            loss = math.exp(-step / 30)
            record.reports.add(step, {"rate": 0.1, "loss": loss, "val_loss": loss + 0.1})
            if step == 60:
                launched = {"attempt": 1, "step": 40, "start": None, "world_size": 2}
                record.take(entry_of({"event": "Launched", "time": 4.0, **launched}))
                for again in range(41, 61):
                    record.reports.add(again, {"rate": 0.1, "loss": 1.0, "val_loss": 1.0})

    return written(tmp_path_factory.mktemp("usual"), fill)


def written(directory: Path, fill: Callable[[RunRecord], None], **changed: Any) -> Path:
    path = directory / "run.html"
    path.write_text(page(replace(facts(fill), **changed)))
    return path


def reported(*rows: Mapping[str, Any]) -> Callable[[RunRecord], None]:
    def fill(record: RunRecord) -> None:
        for step, metrics in enumerate(rows, 1):
            record.reports.add(step, metrics)

    return fill


def fill_with_long_words(record: RunRecord) -> None:
    failure = {
        "kind": "EXCEPTION",
        "rank": 1,
        "step": 1,
        "message": WORD,
        "traceback": WORD,
        "host": WORD,
        "output": WORD,
        "last_lines": [WORD],
        "stacks": {"0": WORD},
    }
    ended = {"attempt": 0, "reason": WORD, "failure": failure}
    record.take(entry_of({"event": "AttemptEnded", "time": 4.0, **ended}))
    launched = {"attempt": 1, "step": 0, "start": None, "world_size": 2, "hosts": [WORD, WORD]}
    record.take(entry_of({"event": "Launched", "time": 4.2, **launched}))
    record.reports.add(1, {WORD: 1.0, f"n/{WORD}": 10**300, "text": WORD})


@pytest.mark.parametrize("size", [PHONE, SCREEN], ids=["phone", "screen"])
@pytest.mark.parametrize("kind", ["one", "two"])
def test_nothing_scrolls_the_page_sideways(
    kind: str, size: dict[str, int], tab: Browser, tmp_path: Path
) -> None:
    known = replace(facts(fill_with_long_words), options={WORD: WORD}, hyperparameters={WORD: WORD})
    known = replace(known, source=replace(known.source, name=WORD, path=f"/{WORD}"))
    other = replace(known, options={WORD: "other"})
    path = tmp_path / "run.html"
    path.write_text(page(known) if kind == "one" else comparison_page(known, other))
    tab.show(opened(path), **size)
    tab.until(DRAWN)
    assert tab.run("document.documentElement.scrollWidth") == size["width"]


@pytest.mark.parametrize("size", [PHONE, SCREEN], ids=["phone", "screen"])
def test_the_first_screen_has_the_verdict_the_values_and_a_chart(
    size: dict[str, int], tab: Browser, usual: Path
) -> None:
    tab.show(opened(usual), **size)
    tab.until(DRAWN)
    for what in (".verdict", "#metrics dd", "#metrics small", ".chart .u-over"):
        bottom = tab.run(f"document.querySelector('{what}').getBoundingClientRect().bottom")
        assert bottom < size["height"], what
    assert "best" in tab.run("document.querySelector('#metrics small').textContent")


@pytest.mark.parametrize("size", [PHONE, SCREEN], ids=["phone", "screen"])
def test_no_time_on_the_timeline_covers_another(
    size: dict[str, int], tab: Browser, tmp_path: Path
) -> None:
    # Times such as "22 h 13 min" are the longest.
    tab.show(opened(written(tmp_path, reported(), wall_s=160_000.0)), **size)
    boxes = tab.run(
        "[...document.querySelectorAll('.ticks text')].map((each) => each.getBoundingClientRect())"
        ".filter(({ width }) => width > 0).map(({ left, right }) => [left, right])"
    )
    assert len(boxes) > 2
    assert all(before[1] < after[0] for before, after in pairwise(boxes))


def ink(tab: Browser) -> tuple[int, int]:
    """How many points of the first chart have the colour of its curve, and in how many rows."""
    points, rows = tab.run("""(() => {
          const canvas = document.querySelector("canvas");
          const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          const rows = new Set();
          let count = 0;
          for (let at = 0; at < pixels.data.length; at += 4) {
            const [red, green, blue, alpha] = pixels.data.slice(at, at + 4);
            if (alpha > 200 && blue - red > 100) {
              count++;
              rows.add(Math.floor(at / 4 / canvas.width));
            }
          }
          return [count, rows.size];
        })()""")
    return points, rows


def test_values_between_others_that_are_not_finite_are_points(tab: Browser, tmp_path: Path) -> None:
    rows = [{"m": float(step) if step % 3 == 0 else math.nan} for step in range(1, 100)]
    tab.show(opened(written(tmp_path, reported(*rows))))
    tab.until(DRAWN)
    # 33 values, of at least nine pixels each.
    assert ink(tab)[0] > 300


CHECK_AXIS = """(([low, high, isLog]) => {
  const [from, to] = axes.range(low, high, isLog);
  const { values, labels, base } = axes.ticks(from, to, 5, { isLog });
  const number = (text) => Number(text.replace(/[,+]/g, ""));
  const read = labels.map((label) => (base === "" ? 0 : number(base)) + number(label));
  return { from, to, values, labels, base, read };
})(%s)"""


@pytest.mark.parametrize("is_log", [False, True])
@given(first=FINITE, second=FINITE)
@example(first=1.0, second=1.0 + 1e-7)
@example(first=1e-30, second=5e-29)
@example(first=-1.7976931348623157e308, second=1.7976931348623157e308)
@example(first=-1.7976930772727274e308, second=-1.7976926227272727e308)
@example(first=1e300, second=1e301)
@example(first=5e-324, second=5e-324)
@example(first=5e-324, second=1e-321)
@example(first=0.0, second=0.0)
@example(first=1e15, second=1e15 + 49)
@example(first=1.0, second=math.nextafter(1.0, 2.0))
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_the_ticks_of_any_range_can_be_read(
    first: float, second: float, tab: Browser, usual: Path, is_log: bool
) -> None:
    if is_log:
        first, second = abs(first) or 5e-324, abs(second) or 5e-324
    low, high = sorted((first, second))
    if not tab.run("typeof axes === 'object'"):
        tab.show(opened(usual))
    axis = tab.run(CHECK_AXIS % f"[{low!r}, {high!r}, {str(is_log).lower()}]")
    values, labels = axis["values"], axis["labels"]
    assert axis["from"] <= low <= high <= axis["to"]
    assert axis["from"] < axis["to"]
    assert all(axis["from"] <= value <= axis["to"] for value in values)
    assert 2 <= len(values) <= 10
    assert len(set(labels)) == len(labels)
    assert all(a < b for a, b in pairwise(values))
    # Halves, as the difference of two numbers may be more than the largest one.
    half = min(b / 4 - a / 4 for a, b in pairwise(values))
    for value, read in zip(values, axis["read"], strict=True):
        assert abs(read / 2 - value / 2) <= half
    assert all(len(label) <= 12 for label in labels) or is_log


@pytest.mark.parametrize(
    "values",
    [(1.0, 1.0 + 1e-7), (1e-30, 5e-30), (-1.7e308, 1.7e308), (5e-324, 2e-322), (0.1, 0.1), (7.0,)],
)
def test_the_curve_of_any_values_is_drawn(
    values: tuple[float, ...], tab: Browser, tmp_path: Path
) -> None:
    rows = [{"m": value} for value in values]
    tab.show(opened(written(tmp_path, reported(*rows))))
    tab.until(DRAWN)
    points, rows = ink(tab)
    # One point, or a line from one side to the other.
    assert points > (200 if len(values) > 1 else 5)
    if len(set(values)) > 1:
        assert rows > 60
    tab.run("document.querySelector('.chart').focus()")
    tab.press("End")
    shown = tab.until("document.querySelectorAll('.u-value')[1].textContent.trim()")
    assert float(shown) == pytest.approx(values[-1], rel=1e-7)


def test_steps_that_were_done_again_are_dotted(tab: Browser, usual: Path) -> None:
    """Points would fill the gaps between the dots."""
    tab.show(opened(usual))
    tab.until(DRAWN)
    dotted = tab.run("""[...page.charts.values()].flatMap((chart) =>
        chart.series.flatMap(({ dash, points }, at) =>
            String(dash) === "2,3" ? [points.show(chart, at)] : []))""")
    assert dotted == [False] * 3


def test_a_log_scale_and_smoothing(tab: Browser, usual: Path) -> None:
    tab.show(opened(usual))
    tab.until(DRAWN)
    before = tab.run("document.querySelector('canvas').toDataURL()")
    tab.run("document.getElementById('log').click()")
    tab.until(f"document.querySelector('canvas').toDataURL() !== {before!r}")
    tab.run("document.getElementById('smoothing').focus()")
    for _ in range(3):
        tab.press("ArrowRight", code=39)
    assert tab.until("document.getElementById('smoothed').textContent") == "0.03"
    labels = "[...document.querySelectorAll('.chart .u-label')].map((each) => each.textContent)"
    assert "loss, smoothed" in tab.run(labels)


@pytest.mark.parametrize("weight", [0.1, 0.6, 0.99])
def test_smoothing_is_the_debiased_average_of_tensorboard(
    weight: float, tab: Browser, usual: Path
) -> None:
    tab.show(opened(usual))
    tab.until(DRAWN)
    values = [3.0, 1.0, None, 4.0, 1.0, 5.0]
    given_values = [value for value in values if value is not None]
    expected = iter(
        sum(value * weight ** (at - past) for past, value in enumerate(given_values[: at + 1]))
        / sum(weight ** (at - past) for past in range(at + 1))
        for at in range(len(given_values))
    )
    found = tab.run(f"page.smoothed([3, 1, null, 4, 1, 5], {weight})")
    assert found == [None if value is None else pytest.approx(next(expected)) for value in values]


def test_training_and_validation_are_in_one_chart(tab: Browser, usual: Path) -> None:
    tab.show(opened(usual))
    tab.until(DRAWN)
    labels = tab.run(
        "[...document.querySelector('.chart').querySelectorAll('.u-label')]"
        ".map((each) => each.textContent)"
    )
    assert [label for label in labels if "restart" not in label] == ["step", "loss", "val_loss"]


def lines_on_paper(printed: bytes) -> int:
    """The stretches of lines in a PDF."""
    count = 0
    for stream in re.finditer(rb"stream\r?\n", printed):
        try:
            text = zlib.decompressobj().decompress(printed[stream.end() :])
        except zlib.error:
            continue
        count += text.count(b" l\n")
    return count


def test_paper_has_the_charts_and_the_tables_and_no_controls(tab: Browser, usual: Path) -> None:
    tab.show(opened(usual), dark=True)
    tab.until(DRAWN)
    printed = tab.pdf()
    pages = len(re.findall(rb"/Type\s*/Page\b", printed))
    assert pages <= 4
    # Curves of a hundred points.
    assert lines_on_paper(printed) > 250
    tab.show(opened(usual), dark=True, media="print")
    tab.until(DRAWN)
    tab.run("dispatchEvent(new Event('beforeprint'))")
    shown = tab.run(
        "['.controls', 'nav', 'details p, details td', '.chart canvas']"
        ".map((each) => document.querySelector(each)?.checkVisibility() ?? null)"
    )
    assert shown[:2] == [False, False]
    assert shown[3] is True
    assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.run("[...document.querySelectorAll('details')].every((each) => each.open)")
    # The blue of a light page, not the pale one of a dark page.
    assert ink(tab)[0] > 100
    tab.run("dispatchEvent(new Event('afterprint'))")


def test_two_hundred_metrics_can_be_searched(tab: Browser, tmp_path: Path) -> None:
    rows = [{f"layer{number}/norm": step for number in range(200)} for step in range(1, 5)]
    tab.show(opened(written(tmp_path, reported(*rows))))
    assert tab.until(DRAWN) == "12"
    assert tab.run("document.querySelector('details.more summary').textContent") == "52 more charts"
    tab.run("document.getElementById('find').focus()")
    for letter in "r63/":
        tab.press(letter, text=letter)
    seen = "[...document.querySelectorAll('figure')].filter((each) => each.checkVisibility())"
    assert tab.run(f"{seen}.map((each) => each.innerText.split('\\n')[0])") == ["layer63/norm"]
    assert tab.run(f"{seen}[0].querySelector('canvas').clientWidth") > 100


@pytest.mark.parametrize("dark", [False, True])
def test_texts_stand_out_from_their_ground(dark: bool, tab: Browser, usual: Path) -> None:
    """The contrast that WCAG 2.1 asks for, 4.5 to 1."""
    tab.show(opened(usual), dark=dark)
    tab.until(DRAWN)
    low = tab.run("""(() => {
      const channel = (part) =>
        part / 255 <= 0.03928 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4;
      const light = (color) => {
        const [red, green, blue] = color.match(/[\\d.]+/g).map(Number).map(channel);
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
      };
      const ground = (element) => {
        const color = getComputedStyle(element).backgroundColor;
        const above = element.parentElement;
        return color === "rgba(0, 0, 0, 0)" && above ? ground(above) : color;
      };
      const found = [];
      for (const element of document.querySelectorAll("main *, header *, footer *")) {
        if (!element.checkVisibility() || element.closest("svg")) continue;
        if (!element.innerText?.trim()) continue;
        const [a, b] = [light(getComputedStyle(element).color), light(ground(element))];
        const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (contrast < 4.5) found.push(element.outerHTML.slice(0, 80) + " " + contrast);
      }
      return found;
    })()""")
    assert low == []


@pytest.fixture(scope="module")
def connected() -> Iterator[Browser]:
    """With a network: a page is at this machine's loopback address."""
    with browser() as made:
        yield made


class TestLive:
    def test_it_changes_in_place_until_the_run_ends(
        self, connected: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(serving, "_REFRESH_S", 0.2)
        # However long it takes to make the page.
        monkeypatch.setattr(serving, "_SHARE", 1000.0)
        file, lines = tmp_path / "journal.jsonl", LINES
        file.write_bytes(b"".join(lines[:10]))
        storage = Location.of(tmp_path).open()
        with serving.served(Location.of(tmp_path, retry_s=0)) as server:
            with leased(storage, storage):
                connected.show(server.url, height=400)
                connected.until(DRAWN)
                connected.run("window.same = true; document.querySelector('.chart').focus()")
                connected.press("+", text="+")
                zoomed = "(({ min, max }) => [min, max])([...page.charts.values()][0].scales.x)"
                zoom = connected.run(zoomed)
                connected.run(
                    "for (const each of document.querySelectorAll('details')) each.open = true"
                )
                connected.run("document.getElementById('log').click()")
                connected.run("document.querySelector('.chart').focus()")
                connected.run("scrollTo(0, 150)")
                was = connected.run("document.getElementById('facts').textContent.length")
                file.write_bytes(b"".join(lines[:11]))
                connected.until(f"document.getElementById('facts').textContent.length > {was}")
                assert connected.run("window.same") is True
                assert connected.run("document.activeElement.className") == "chart"
                assert connected.run("scrollY") == 150
                assert connected.run(zoomed) == zoom
                assert connected.run("document.querySelectorAll('details[open]').length") > 0
                assert connected.run("document.querySelector('.controls').checkVisibility()")
                assert connected.run("document.getElementById('log').checked")
                assert "Live" in connected.run("document.getElementById('live').textContent")
                # The whole journal: it has the run's conclusion.
                file.write_bytes(b"".join(lines))
            connected.until(
                "document.getElementById('live').textContent.includes('no longer active')"
            )
            assert connected.run("document.title.includes('finished')")
            assert connected.run("window.same") is True
            # Nothing asks for it any more.
            assert connected.run("document.body.dataset.refresh") == ""

    def test_it_says_when_the_connection_is_lost(
        self, connected: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(serving, "_REFRESH_S", 0.2)
        # However long it takes to make the page.
        monkeypatch.setattr(serving, "_SHARE", 1000.0)
        (tmp_path / "journal.jsonl").write_bytes(b"".join(LINES[:10]))
        storage = Location.of(tmp_path).open()
        with leased(storage, storage):
            with serving.served(Location.of(tmp_path, retry_s=0)) as server:
                connected.show(server.url)
                connected.until("document.getElementById('live').textContent.startsWith('Live')")
            connected.until(
                "document.getElementById('live').textContent.startsWith('Not live since')"
            )
            assert connected.run("document.querySelectorAll('canvas').length") > 0
