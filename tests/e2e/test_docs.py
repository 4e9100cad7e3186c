"""Every Python example of the README and the docs runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.porting import files_of
from tests.sweeps import only_in_sweep

from polytrain import ScalingConfig, Trainer
from polytrain.testing import BackendConformance

pytestmark = pytest.mark.usefixtures("at_home")

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]


_BLOCK = re.compile(
    r"```python\n(.*?)```(?:\n+It prints:\n+```\n(.*?)```)?", flags=re.MULTILINE | re.DOTALL
)


def blocks(page: str) -> list[str]:
    return [text for text, _ in _BLOCK.findall((ROOT / page).read_text())]


WITH_LIBRARIES = ("docs/deepspeed.md", "docs/keras.md", "docs/transformers.md")
"""Pages whose workers import libraries for seconds: tests of each library are in `make test`."""


EXAMPLES = [
    (only_in_sweep if page in WITH_LIBRARIES else pytest.param)(text, shown, id=f"{page}-{index}")
    for page in PAGES
    for index, (text, shown) in enumerate(_BLOCK.findall((ROOT / page).read_text()), start=1)
]


def masked(output: str) -> str:
    """With fractions and seconds replaced: they depend on versions of libraries, and on load."""
    return re.sub(r"\d+\.\d+(e-?\d+)?|\b\d+(?= s\b)", "N", output).strip()


def run(text: str) -> dict[str, Any]:
    """As a script would: functions defined here travel to the workers by value."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "example", "exec"), names)
    return names


@pytest.mark.sweep
@pytest.mark.parametrize(("text", "shown"), EXAMPLES)
def test_example(text: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = run(text)
    if shown:
        printed = capsys.readouterr().out.splitlines()
        assert masked("\n".join(printed)) == masked(shown)
    if "result" in names:
        assert names["result"].error is None
        assert names["result"].checkpoint is not None


def test_the_quickstart_prints_what_it_shows(home: Path) -> None:
    page = (ROOT / "docs/quickstart.md").read_text()
    for name, text in files_of("quickstart.md").items():
        (home / name).write_text(text)
        done = subprocess.run(
            [sys.executable, name], cwd=home, capture_output=True, text=True, check=True
        )
        shown = re.search(rf"\$ python {name}\n(.*?)```", page, flags=re.DOTALL)
        assert shown
        messages = done.stderr.replace(str(home), "/home/me")
        # A slow machine shows the state after half a minute.
        messages = re.sub(r"^\w+: .*\branks, .*\n", "", messages, flags=re.MULTILINE)
        assert masked(messages + done.stdout) == masked(shown[1])


def test_readme_losses_go_down() -> None:
    history = run(blocks("README.md")[1])["result"].history
    assert [h["loss"] for h in history] == sorted((h["loss"] for h in history), reverse=True)


def test_documented_backend_trains_and_is_refused_with_two_workers(tmp_path: Path) -> None:
    """The example's own comment says what happens to it."""
    from polytrain import RunConfig, TrainingFailedError

    counting = run(blocks("docs/writing-a-backend.md")[0])["Counting"]
    data = {"train": {"x": list(range(10))}}

    def trainer(workers: int) -> Trainer:
        return Trainer(
            counting(),
            datasets=data,
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(storage_path=tmp_path, progress=False),
        )

    assert trainer(1).fit().load_model() == 10
    with pytest.raises(TrainingFailedError, match="spans 1 of 2 ranks"):
        trainer(2).fit()


def test_the_documented_collective_sums_over_all_ranks() -> None:
    names = run(blocks("docs/writing-a-backend.md")[1])

    for workers in (1, 3):
        result = Trainer(
            names["Mean"](column="x"),
            datasets={"train": {"x": [float(number) for number in range(9)]}},
            scaling_config=ScalingConfig(num_workers=workers),
        ).fit()
        assert result.load_model() == 4.0
        assert result.metrics == {"rows": 9}


def test_documented_test_file_is_a_test(tmp_path: Path) -> None:
    names = run(blocks("docs/writing-a-backend.md")[2])
    assert issubclass(names["TestReference"], BackendConformance)


def test_readme_begins_with_the_two_commands() -> None:
    head = (ROOT / "README.md").read_text().split("## Ten lines")[0]
    assert "make demo" in head
    assert "make test" in head
