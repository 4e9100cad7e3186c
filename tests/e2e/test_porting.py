"""The pages about porting: what a diff shows runs before under its origin, and after on polytrain.

All give the same numbers.
"""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.e2e.porting import diffs_of, files_of, numbers_in, printed
from tests.e2e.torch_runs import HUGGING_FACE, libraries_in_zygotes
from torch.utils.data.distributed import DistributedSampler

TORCHRUN = (
    *("-m", "torch.distributed.run", "--nproc-per-node=2"),
    str(Path(__file__).with_name("script_without_teardown.py")),
)

ORIGINS = {
    "torchrun": (*TORCHRUN, "train.py", "--epochs=3"),
    # On CPUs `accelerate launch` starts one process only, without MPI.
    "accelerate": (*TORCHRUN, "train.py"),
    "lightning": ("train.py",),
}
"""By page, how its script is run where it comes from."""

LIBRARIES = {"torchrun": (), "accelerate": HUGGING_FACE, "lightning": ("lightning",)}
"""By page, what is imported before its workers are forked."""

EPOCHS = {"torchrun": 3, "accelerate": 2, "lightning": 2}


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a page's files are; also the home, where runs are stored by default."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize("page", ORIGINS)
def test_a_script_runs_unchanged_and_as_the_diff_changes_it(
    capfd: pytest.CaptureFixture[str], page: str
) -> None:
    """What it prints is what one process prints that trains on the rows of both ranks."""
    files = files_of(f"{page}.md")
    before, after = diffs_of(f"{page}.md")["train.py"]
    assert before == files["train.py"]
    for name, text in (*files.items(), ("ported.py", after)):
        Path(name).write_text(text)
    expected = printed_by_one_process(EPOCHS[page])
    assert expected["loss"] < 0.01
    with libraries_in_zygotes(*LIBRARIES[page]):
        assert printed_here("launch.py", capfd) == pytest.approx(expected, rel=UNCHANGED[page])
        assert printed_here("ported.py", capfd) == pytest.approx(expected, rel=1e-3)


UNCHANGED = {"torchrun": 1e-4, "accelerate": 1e-4, "lightning": 0.2}
"""Lightning shuffles the rows of a script that runs unchanged; polytrain keeps a loader's order."""


@pytest.mark.sweep
@pytest.mark.only_in_sweep
@pytest.mark.parametrize("page", ORIGINS)
def test_a_script_prints_where_it_comes_from_what_it_prints_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for name, text in files_of(f"{page}.md").items():
        Path(name).write_text(text)
    expected = printed(tmp_path, ORIGINS[page])
    assert expected["loss"] < 0.01
    assert printed(tmp_path, ["launch.py"]) == pytest.approx(expected, rel=1e-5)


def test_a_script_of_horovod_runs_after_a_change_of_its_import(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Horovod isn't installed; its numbers are those of one process, which averages itself."""
    before, after = diffs_of("horovod.md")["train.py"]
    assert before.replace("horovod.torch", "polytrain_torch.horovod") == after
    Path("train.py").write_text(after)
    Path("launch.py").write_text(files_of("horovod.md")["launch.py"])
    expected = printed_by_one_process(3, shuffle=True, momentum=0.5)
    assert printed_here("launch.py", capfd) == pytest.approx(expected, rel=1e-4)


def printed_here(file: str, capfd: pytest.CaptureFixture[str]) -> dict[str, float]:
    """Run a driver's file in this process, whose workers needn't import everything again."""
    capfd.readouterr()
    runpy.run_path(file, run_name="__main__")
    return numbers_in(capfd.readouterr().out)


def printed_by_one_process(
    epochs: int, *, shuffle: bool = False, momentum: float = 0.0
) -> dict[str, float]:
    """What two ranks of the pages' scripts print, of the same rows in the same order."""
    torch.manual_seed(0)
    if shuffle:
        x = torch.randn(256, 3, generator=torch.Generator().manual_seed(0))
    else:
        x = torch.randn(256, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]])
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    for epoch in range(epochs):
        ranks = []
        for rank in range(2):
            sampler = DistributedSampler(  # type: ignore[var-annotated]
                x,  # type: ignore[arg-type]
                num_replicas=2,
                rank=rank,
                shuffle=shuffle,
            )
            sampler.set_epoch(epoch)
            ranks.append([*sampler])
        for begin in range(0, 128, 16):
            batch = [row for rows in ranks for row in rows[begin : begin + 16]]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return {"loss": torch.nn.functional.mse_loss(model(x), y).item()}


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_a_script_of_dask(tmp_path: Path, capfd: pytest.CaptureFixture[str], library: str) -> None:
    """Its model isn't the same: with Dask, bins depend on the partitions."""
    script = f"train_{library}.py"
    before, after = diffs_of("porting.md")[script]
    Path("ported.py").write_text(after)
    ported = printed_here("ported.py", capfd)["rmse"]
    assert ported == pytest.approx(ONE_PROCESS[library](), rel=0.02)
    # A yardstick, which is installed only for benchmarks.
    if find_spec("distributed"):
        Path(script).write_text(before)
        assert printed(tmp_path, [script])["rmse"] == pytest.approx(ported, rel=0.1)


def rmse_of_xgboost() -> float:
    import xgboost

    matrix = xgboost.DMatrix(X, label=Y)
    params = {"objective": "reg:squarederror", "max_depth": 4}
    model = xgboost.train(params, matrix, num_boost_round=20)
    return float(np.sqrt(np.mean((model.predict(matrix) - Y) ** 2)))


def rmse_of_lightgbm() -> float:
    import lightgbm

    params = {"objective": "regression", "num_leaves": 15, "verbose": -1}
    model = lightgbm.train(params, lightgbm.Dataset(X, label=Y), num_boost_round=20)
    return float(np.sqrt(np.mean((np.asarray(model.predict(X)) - Y) ** 2)))


ONE_PROCESS = {"xgboost": rmse_of_xgboost, "lightgbm": rmse_of_lightgbm}
X = np.random.default_rng(0).normal(size=(2000, 4))
Y = X @ [1.0, -2.0, 0.5, 0.0]
