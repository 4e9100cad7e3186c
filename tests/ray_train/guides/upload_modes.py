"""Checkpoints that are stored while training continues, in each of the ways to store them."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import ray.train
from ray.train import Checkpoint, CheckpointUploadMode, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def copied(checkpoint, name):
    """Stores a checkpoint in its own way, and says where it is."""
    target = os.path.join(ray.train.get_context().get_storage().experiment_fs_path, name)
    with checkpoint.as_directory() as directory:
        shutil.copytree(directory, target, dirs_exist_ok=True)
    return Checkpoint(target)


def train_func():
    rank = ray.train.get_context().get_world_rank()
    for step, how in enumerate(["sync", "async", "function", "none"]):
        # Each rank has a file in the checkpoint.
        directory = tempfile.mkdtemp()
        options = {"checkpoint_dir_name": f"step_{step}"}
        if how == "none":
            options["checkpoint_upload_mode"] = CheckpointUploadMode.NO_UPLOAD
            storage = ray.train.get_context().get_storage()
            directory = storage.build_checkpoint_path_from_name(f"step_{step}")
            os.makedirs(directory, exist_ok=True)
        elif how == "async":
            options["checkpoint_upload_mode"] = CheckpointUploadMode.ASYNC
        elif how == "function":
            options["checkpoint_upload_mode"] = CheckpointUploadMode.ASYNC
            options["checkpoint_upload_fn"] = copied
        with open(os.path.join(directory, f"rank_{rank}"), "w") as file:
            file.write(how)
        checkpoint = Checkpoint.from_directory(directory)
        ray.train.report({"step": step, "how": how}, checkpoint=checkpoint, **options)
    reported = ray.train.get_all_reported_checkpoints()
    return [each.metrics["how"] for each in reported]


trainer = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="uploads", storage_path=os.path.abspath("storage")),
)
result = trainer.fit()
stored = {}
for checkpoint, metrics in result.best_checkpoints:
    with checkpoint.as_directory() as directory:
        ranks = sorted(name for name in os.listdir(directory) if name.startswith("rank_"))
        stored[metrics["how"]] = [Path(directory, name).read_text() for name in ranks]
print("RESULT", json.dumps({"stored": stored, "reported": result.return_value}))
