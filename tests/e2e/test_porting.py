"""The pages about porting: what a diff shows runs before under its origin, and after on polytrain.

Both give the same numbers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.e2e.porting import diffs_of, files_of, printed
from torch.utils.data.distributed import DistributedSampler

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")


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
