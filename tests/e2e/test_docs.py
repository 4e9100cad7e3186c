"""Every Python example of the README and the docs runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from polytrain import ScalingConfig, Trainer
from polytrain.testing import BackendConformance

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


EXAMPLES = [
    pytest.param(text, id=f"{page}-{index}")
    for page in PAGES
    for index, text in enumerate(blocks(page), start=1)
]


def run(text: str) -> dict[str, Any]:
    """As a script would: functions defined here travel to the workers by value."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "example", "exec"), names)
    return names


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all: another one would be another environment, in which zygotes import anew."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples write where a user would have them write."""
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)


@pytest.mark.parametrize("text", EXAMPLES)
def test_example(text: str) -> None:
    names = run(text)
    if "result" in names:
        assert names["result"].error is None
        assert names["result"].checkpoint is not None


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


def test_documented_test_file_is_a_test(tmp_path: Path) -> None:
    names = run(blocks("docs/writing-a-backend.md")[1])
    assert issubclass(names["TestReference"], BackendConformance)


def test_readme_begins_with_the_two_commands() -> None:
    head = (ROOT / "README.md").read_text().split("## Ten lines")[0]
    assert "make demo" in head
    assert "make test" in head
