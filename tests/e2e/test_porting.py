"""The pages about porting: what a diff shows runs before under its origin, and after on polytrain.

Both give the same numbers.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.e2e.porting import diffs_of, files_of, printed
from torch.utils.data.distributed import DistributedSampler

TORCHRUN = (
    *("-m", "torch.distributed.run", "--nproc-per-node=2"),
    str(Path(__file__).with_name("script_without_teardown.py")),
)


def test_a_script_of_torchrun_runs_unchanged_and_as_a_function(tmp_path: Path) -> None:
    files = files_of("torchrun.md")
    before, after = diffs_of("torchrun.md")["train.py"]
    assert before == files["train.py"]
    for name, text in (*files.items(), ("ported.py", after)):
        (tmp_path / name).write_text(text)
    expected = printed(tmp_path, [*TORCHRUN, "train.py", "--epochs=3"])
    assert expected["loss"] < 0.01
    assert printed(tmp_path, ["launch.py"]) == pytest.approx(expected, rel=1e-5)
    assert printed(tmp_path, ["ported.py"]) == pytest.approx(expected, rel=1e-3)


def test_a_script_of_horovod_runs_after_a_change_of_its_import(tmp_path: Path) -> None:
    """Horovod isn't installed; its numbers are those of one process, which averages itself."""
    before, after = diffs_of("horovod.md")["train.py"]
    assert before.replace("horovod.torch", "polytrain_torch.horovod") == after
    (tmp_path / "train.py").write_text(after)
    (tmp_path / "launch.py").write_text(files_of("horovod.md")["launch.py"])
    assert printed(tmp_path, ["launch.py"]) == pytest.approx(printed_by_one_process(), rel=1e-4)


def printed_by_one_process() -> dict[str, float]:
    """What two ranks of Horovod print, of the same rows in the same order."""
    torch.manual_seed(0)
    x = torch.randn(256, 3, generator=torch.Generator().manual_seed(0))
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]])
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for epoch in range(3):
        ranks = []
        for rank in range(2):
            sampler = DistributedSampler(x, num_replicas=2, rank=rank)  # type: ignore[arg-type]
            sampler.set_epoch(epoch)
            ranks.append([*sampler])
        for begin in range(0, 128, 16):
            batch = [row for rows in ranks for row in rows[begin : begin + 16]]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return {"loss": torch.nn.functional.mse_loss(model(x), y).item()}


def test_a_script_of_lightning(tmp_path: Path) -> None:
    """Lightning shuffles the rows; polytrain keeps the loader's order."""
    check_before_and_after("lightning.md", tmp_path, "train.py", ported_rel=0.2)


def test_a_script_of_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs `accelerate launch` starts one process only, without MPI."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    check_before_and_after("accelerate.md", tmp_path, *TORCHRUN, "train.py")


def check_before_and_after(
    page: str, directory: Path, *command: str, ported_rel: float = 1e-3
) -> None:
    """Run a page's script under its origin, unchanged on polytrain, and as the diff changes it."""
    files = files_of(page)
    before, after = diffs_of(page)["train.py"]
    assert before == files["train.py"]
    for name, text in (*files.items(), ("ported.py", after)):
        (directory / name).write_text(text)
    expected = printed(directory, command)
    assert expected["loss"] < 0.01
    assert printed(directory, ["launch.py"]) == pytest.approx(expected, rel=1e-5)
    assert printed(directory, ["ported.py"]) == pytest.approx(expected, rel=ported_rel)


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_a_script_of_dask(tmp_path: Path, library: str) -> None:
    """Its model isn't the same: with Dask, bins depend on the partitions."""
    script = f"train_{library}.py"
    before, after = diffs_of("porting.md")[script]
    (tmp_path / "ported.py").write_text(after)
    ported = printed(tmp_path, ["ported.py"])["rmse"]
    assert ported == pytest.approx(ONE_PROCESS[library](), rel=0.02)
    # A yardstick, which is installed only for benchmarks.
    if find_spec("distributed"):
        (tmp_path / script).write_text(before)
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
