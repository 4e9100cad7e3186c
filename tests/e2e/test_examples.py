"""The example of each library, as by its command: it learns, and survives a death."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs are kept that say nothing of it."""
    return tmp_path_factory.mktemp("home")


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*_digits.py")))
def test_an_example_learns_although_a_worker_is_killed(
    name: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert f"\npython examples/{name}\n" in (EXAMPLES / name).read_text()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(EXAMPLES)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    output = capsys.readouterr().out
    assert "2 workers, 1 restart\n" in output
    told = re.search(r"^([\d.]+)% of 357 digits are recognised$", output, re.MULTILINE)
    assert told, output
    # Somebody who guesses recognises 10 %.
    assert float(told[1]) > 85
