"""torch's libraries on several nodes, each with a disk of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.driver import PREAMBLE
from tests.sweeps import only_in_sweep

SCRIPT = """
import json
from pathlib import Path
from polytrain import CheckpointConfig
from ray.cluster_utils import Cluster

def node(name, cpus):
    own = {"resources": {name: 1}, "env_vars": {"DISK": name}}
    return {"num_cpus": cpus, "include_log_monitor": False, **own}

head_args = {"include_dashboard": False, **node("first", 2)}
cluster = Cluster(initialize_head=True, head_node_args=head_args)
cluster.add_node(**node("second", 1))
cluster.wait_for_nodes()
ray.init(address=cluster.address, log_to_driver=False, logging_level=40)

def train(config):
    import torch
    import torch.distributed as dist
    from polytrain_torch import prepare_model

    model = prepare_model(torch.nn.Linear(1, 1))
    model(torch.full((1, 1), 1.0 + dist.get_rank())).sum().backward()
    found = {
        "backend": dist.get_backend(model.process_group),
        "gradient": next(model.parameters()).grad.item(),
    }
    if os.environ["LIBRARY"] == "lightning":
        found["predicted"] = predicted_by_lightning(config)

    save({"with": found})

def predicted_by_lightning(config):
    import lightning
    import torch
    import torch.distributed as dist
    from polytrain_torch.lightning import Trainer
    from torch.utils.data import DataLoader

    disk = Path(config["disks"], os.environ["DISK"])
    rank = dist.get_rank()

    class Rows(lightning.LightningDataModule):
        def prepare_data(self):
            with (disk / "prepared").open("a") as file:
                file.write(f"by rank {rank}")

        def predict_dataloader(self):
            return DataLoader(torch.arange(4.0))

    class Module(lightning.LightningModule):
        def predict_step(self, batch, index):
            return batch

    trainer = Trainer(default_root_dir=disk, logger=False, enable_model_summary=False)
    return len(trainer.predict(Module(), datamodule=Rows()))

def save(config):
    import torch.distributed as dist
    from polytrain_torch.checkpoints.parts import checkpoint_of, directory_of_all, part_of

    rank = dist.get_rank()
    with directory_of_all() as saved:
        (saved / f"of_rank_{rank}").write_text(str(rank))
        (saved / "everybodys").write_text("the same")
        with part_of(saved) as part:
            polytrain.report(config.get("with", {}), checkpoint_of(part))

def fit(function, written_by):
    return make_trainer(
        "torch", function, train_loop_config={"disks": os.environ["DISKS"]},
        scaling_config=ScalingConfig(num_workers=3),
        run_config=RunConfig(
            storage_path="runs", progress=False,
            checkpoint_config=CheckpointConfig(written_by=written_by),
        ),
    ).fit()

result = fit(train, "every_rank")
with result.checkpoint.as_directory() as directory:
    files = {file.name: file.read_text() for file in Path(directory).iterdir()}
    del files["polytrain-manifest.json"]
refused = ""
try:
    fit(save, "rank_0")
except polytrain.TrainingFailedError as error:
    refused = str(error)
found = {**result.metrics, "files": files, "refused": refused}
# Not on the standard output: the ranks' lines are printed there by another thread.
Path("found.json").write_text(json.dumps(found))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.sweep
@pytest.mark.parametrize("library", ["torch", only_in_sweep("lightning")])
def test_gradients_parts_of_checkpoints_and_prepared_data(tmp_path: Path, library: str) -> None:
    """On Ray, Lightning is imported by each worker in each attempt, for seconds."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    path = tmp_path / "script.py"
    path.write_text(PREAMBLE + "import ray\n" + SCRIPT)
    run = subprocess.run(
        [sys.executable, path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "DISKS": str(tmp_path), "LIBRARY": library},
    )
    assert (tmp_path / "found.json").exists(), run.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["backend"], found["gradient"]) == ("gloo", 2.0)
    assert found["files"] == {
        **{f"of_rank_{rank}": str(rank) for rank in range(3)},
        "everybodys": "the same",
    }
    # Where rank 0 writes, what it doesn't see would be missing.
    assert "of_rank_2: rank 0 writes" in found["refused"]
    assert 'CheckpointConfig(written_by="every_rank")' in found["refused"]
    if library == "torch":
        return
    assert found["predicted"] == 2  # of four rows on three ranks
    prepared = [(tmp_path / name / "prepared").read_text() for name in ("first", "second")]
    assert sorted(prepared) == ["by rank 0", "by rank 2"]
