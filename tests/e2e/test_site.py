"""The documentation's site: built strictly, and read in a browser without a network."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.browser import BROWSER, Browser, browser, opened
from tests.e2e.test_page_in_browser import WITHOUT_NETWORK, can_be_cut_off

ROOT = Path(__file__).parents[2]

SIZES = (
    {"width": 390, "height": 844},
    {"width": 1280, "height": 800},
    {"width": 1280, "height": 800, "dark": True},
)

in_browser = [
    pytest.mark.skipif(BROWSER is None, reason="no chromium is installed"),
    pytest.mark.skipif(not can_be_cut_off(), reason="network namespaces aren't allowed here"),
]


# To build it takes half a minute. That links lead somewhere is tested without it.
pytestmark = [pytest.mark.sweep, pytest.mark.only_in_sweep]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going"]
    built = subprocess.run(
        [*command, "--conf-dir", "docs", ".", directory], cwd=ROOT, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    return directory


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser(WITHOUT_NETWORK) as made:
        yield made


def test_every_page_is_in_the_contents(site: Path) -> None:
    index = (site / "docs/index.html").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        address = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert page.stem == "index" or f'href="{address}"' in index


@pytest.mark.parametrize("size", SIZES, ids=("phone", "desktop", "dark"))
@pytest.mark.parametrize("page", ["index", "torch", "reference/trainers"])
class TestInBrowser:
    pytestmark = in_browser

    def test_a_page_fits_its_screen(
        self, site: Path, tab: Browser, page: str, size: dict[str, Any]
    ) -> None:
        tab.show(opened(site / f"docs/{page}.html"), **size)
        assert tab.run("document.documentElement.scrollWidth") <= size["width"]
        assert not tab.said()

    def test_a_page_has_no_barriers(
        self, site: Path, tab: Browser, page: str, size: dict[str, Any]
    ) -> None:
        tab.show(opened(site / f"docs/{page}.html"), **size)
        tab.run(f"{axe()}; 0")
        found = tab.run("axe.run({preload: false}).then((found) => found.violations)")
        assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []


class TestSearch:
    pytestmark = in_browser

    @pytest.mark.parametrize(
        ("words", "page"), [("FailureConfig", "trainers.html"), ("out of memory", "failures.html")]
    )
    def test_a_search_finds_the_page(self, site: Path, tab: Browser, words: str, page: str) -> None:
        tab.show(f"{opened(site / 'search.html')}?q={words.replace(' ', '+')}")
        tab.until(f"document.querySelector('#search-results a[href*=\"{page}\"]') !== null")


def axe() -> str:
    """Return axe-core, which looks for barriers."""
    found = importlib.util.find_spec("axe_playwright_python")
    assert found is not None
    assert found.submodule_search_locations is not None
    return (Path(found.submodule_search_locations[0]) / "axe.min.js").read_text()
