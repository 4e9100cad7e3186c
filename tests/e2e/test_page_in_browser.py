"""A run's page in a browser without a network: its own scripts run, nothing else does."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import polytrain
from polytrain import FailureConfig, Result, RunConfig, ScalingConfig, make_trainer
from polytrain.storage.location import Location
from polytrain.view.page.reading import read_facts
from polytrain.view.page.rendering import comparison_page

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")

WITHOUT_NETWORK = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "-r", "--net"]


def can_be_cut_off() -> bool:
    """Whether this machine lets tests start a process without a network."""
    return subprocess.run([*WITHOUT_NETWORK, "true"], capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no chromium is installed"),
    pytest.mark.skipif(not can_be_cut_off(), reason="network namespaces aren't allowed here"),
]

HOSTILE = """</script><script>document.title = "taken over"</script><img src=x onerror=alert(1)>"""

PRESS = """
<script>
const chart = document.querySelector(".chart");
chart.focus();
for (const key of KEYS) chart.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
</script>
</body>
"""

RECORD = """
<script>
const texts = new Set();
const fillText = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
  texts.add(text);
  document.documentElement.dataset.labels = [...texts].join(" ");
  return fillText.call(this, text, ...rest);
};
</script>
</head>
"""


def train() -> None:
    for step in range(1, 21):
        polytrain.report({"loss": 100 + step, HOSTILE: step, "eval": {"a/b": float("nan")}})
        if step == 5 and polytrain.get_context().get_attempt() == 0:
            raise ValueError(HOSTILE)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with a restart."""
    directory = tmp_path_factory.mktemp("page")
    result = make_trainer(
        "reference",
        train,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(
            name="run",
            storage_path=directory,
            progress=False,
            failure_config=FailureConfig(max_failures=1),
        ),
    ).fit()
    return Result.from_path(result.path).report(directory / "run.html")


def opened(page: Path) -> tuple[str, str]:
    """What a browser without a network makes of a page: its document, and what it says of it."""
    assert BROWSER is not None
    browser = subprocess.run(
        [
            *WITHOUT_NETWORK,
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--enable-logging=stderr",
            f"--user-data-dir={page.parent / 'profile'}",
            "--virtual-time-budget=5000",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert browser.returncode == 0, browser.stderr
    said = [line for line in browser.stderr.splitlines() if "CONSOLE" in line]
    return browser.stdout, "\n".join(said)


@pytest.mark.only_in_sweep
def test_the_picture_in_the_docs_can_be_taken(tmp_path: Path) -> None:
    """`make screenshot`, into another directory."""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, root / ".ci" / "screenshot.py", tmp_path], check=True)
    picture = (tmp_path / "report.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    # Its width and height, in its first chunk.
    assert struct.unpack(">II", picture[16:24]) == (1000, 645)
    # A blank one takes a few kilobytes.
    assert len(picture) > 20_000
    kept = root / "docs" / "images" / "report.sha256"
    assert (tmp_path / "report.sha256").read_text() == kept.read_text()


def test_curves_are_drawn_and_no_text_of_the_run_runs(written: Path) -> None:
    document, said = opened(written)
    assert said == ""
    assert "<title>run: finished</title>" in document
    assert 'data-charts="3"' in document
    assert document.count("<canvas") == 3
    assert "<img" not in document


def test_two_runs_are_drawn_over_each_other(written: Path) -> None:
    facts = read_facts(Location.of(written.parent / "run"))
    page = written.with_name("two.html")
    page.write_text(comparison_page(facts, facts))
    document, said = opened(page)
    assert said == ""
    assert 'data-charts="3"' in document
    assert "<img" not in document


def test_what_is_added_to_a_page_does_not_run(written: Path) -> None:
    page = written.with_name("changed.html")
    added = "<script>document.title = 'taken over'</script><img src='http://127.0.0.1:9/x'></body>"
    page.write_text(written.read_text().replace("</body>", added))
    document, said = opened(page)
    assert "<title>run: finished</title>" in document
    assert "Content Security Policy" in said


@pytest.mark.parametrize(
    ("keys", "step"),
    [('["Home"]', 1), ('["End"]', 20), ('["Home", "ArrowRight", "ArrowRight"]', 3)],
)
def test_the_cursor_moves_by_the_keyboard(keys: str, step: int, written: Path) -> None:
    page = written.with_name("pressed.html")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", written.read_text())
    page.write_text(text.replace("</body>", PRESS.replace("KEYS", keys)))
    document, _ = opened(page)
    values = re.findall(r'<td class="u-value">([^<]*)</td>', document)
    assert values[:2] == [str(step), str(100 + step)]


@pytest.mark.parametrize(
    ("values", "labels", "last"),
    [
        ((0.00001, 0.0001), {"2e-5", "4e-5", "6e-5", "8e-5", "1e-4"}, "1e-4"),
        ((0.0021, 0.0023), {"0.0021", "0.0022", "0.0023"}, "0.0023"),
        ((0.91, 0.9101), {"0.91", "0.91005", "0.9101"}, "0.9101"),
        ((-0.0003, 0.0), {"-3e-4", "-2e-4", "-1e-4", "0"}, "0"),
        ((0, 39_000_000_000), {"0", "1e10", "2e10", "3e10"}, "3.9e10"),
        ((0, 12_500), {"0", "5,000", "10,000"}, "12,500"),
    ],
)
def test_numbers_of_any_size_can_be_read(
    values: tuple[float, float], labels: set[str], last: str, tmp_path: Path
) -> None:
    def train() -> None:
        for value in values:
            polytrain.report({"metric": value})

    result = make_trainer(
        "reference",
        train,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=tmp_path, progress=False),
    ).fit()
    page = result.report(tmp_path / "run.html")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    text = text.replace("</head>", RECORD)
    page.write_text(text.replace("</body>", PRESS.replace("KEYS", '["End"]')))
    document, _ = opened(page)
    shown = re.search(r'data-labels="([^"]*)"', document)
    assert shown is not None
    assert labels <= set(shown[1].split())
    assert f">{last}</td>" in document
