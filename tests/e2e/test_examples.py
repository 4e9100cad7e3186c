"""The examples, as by their commands: they print what their page says, and survive a death."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.torch_runs import HUGGING_FACE, libraries_in_zygotes
from tests.sweeps import only_in_sweep

pytestmark = pytest.mark.usefixtures("at_home")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SHOWN = dict(
    re.findall(
        r"^\*\*`(\w+\.py)`\*\*:.*?```\n(.*?)```",
        (ROOT / "docs/examples.md").read_text(),
        flags=re.MULTILINE | re.DOTALL,
    )
)
"""Example to its output on the page."""


ONLY_IN_SWEEP = {
    "accelerate_digits.py",
    "char_lm_fsdp.py",
    "deepspeed_digits.py",
    "elastic.py",
    "keras_digits.py",
    "lightning_digits.py",
    "ray_data_pipeline.py",
    "stop_and_resume.py",
    "storage_s3.py",
    "tensorflow_digits.py",
    "torch_images.py",
    "tracking.py",
    "transformers_digits.py",
    "transformers_finetune.py",
}
"""Examples that take long, as by imports or because they wait for nodes. `make test` has other
tests of what they show."""


PRELOADED = (*HUGGING_FACE, "datasets", "peft", "sklearn.datasets")
"""For examples whose workers can't be preloaded after the first attempt, because of DeepSpeed: each
would import these modules for seconds. That of Accelerate, which is among them, runs without."""


def framework(name: str) -> str:
    """Whose zygote an example's workers are forked from: those of one framework share one."""
    if name.startswith(("deepspeed", "transformers")):
        return "DeepSpeed"
    return "tensorflow" if name.startswith(("keras", "tensorflow")) else "torch"


@pytest.fixture(autouse=True)
def preloaded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Import an example's libraries before the zygote forks, if its workers all would."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is None or framework(callspec.params["name"]) != "DeepSpeed":
        yield
        return
    # DeepSpeed, which peft imports where it is installed, prints that it looks for GPUs.
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with libraries_in_zygotes(*PRELOADED):
        yield


def by_framework(names: Iterable[str]) -> list[Any]:
    """The names as cases, those whose workers share a zygote after one another."""
    in_order = sorted(names, key=lambda name: (framework(name), name))
    return [only_in_sweep(name) if name in ONLY_IN_SWEEP else name for name in in_order]


@pytest.mark.sweep
@pytest.mark.parametrize("name", by_framework(path.name for path in EXAMPLES.glob("*_digits.py")))
def test_an_example_learns_although_a_worker_is_killed(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert f"\npython examples/{name}\n" in (EXAMPLES / name).read_text()
    monkeypatch.syspath_prepend(EXAMPLES)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    output = capsys.readouterr().out
    assert "2 workers, 1 restart\n" in output
    found = re.search(r"^([\d.]+)% of 357 digits are recognised$", output, re.MULTILINE)
    assert found, output
    # Somebody who guesses recognises 10 %.
    assert float(found[1]) > 85


def masked(output: str) -> str:
    """With each number replaced: its last digits depend on versions of libraries."""
    return re.sub(r"\d+(\.\d+)?", "N", output)


@pytest.mark.sweep
@pytest.mark.parametrize("name", by_framework(SHOWN))
def test_an_example_prints_what_its_page_shows(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert f"\npython examples/{name}\n" in (EXAMPLES / name).read_text()
    monkeypatch.syspath_prepend(EXAMPLES)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = [line for line in capsys.readouterr().out.splitlines() if "(rank " not in line]
    assert masked("\n".join(printed)) == masked(SHOWN[name].strip())


def test_every_example_is_on_the_page() -> None:
    page = (ROOT / "docs/examples.md").read_text()
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    parts_of_others = {"digits.py", "demo.py", "single_process.py", "training_functions.py"}
    assert [name for name in scripts - parts_of_others if f"`{name}`" not in page] == []
    assert scripts >= ONLY_IN_SWEEP
