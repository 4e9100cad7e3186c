"""Names of Ray Train that polytrain doesn't have, each with a sentence on what to use instead."""

from __future__ import annotations

from collections.abc import Mapping

_FILES = (
    "write the model's files into a directory and report Checkpoint.from_directory(path); "
    "Result.load_model() reads what a backend's own files hold"
)
_WORKER_ERRORS = (
    "every failed run raises polytrain.TrainingFailedError, whose `failures` have the kind, the "
    "rank and the traceback"
)


_BACKEND = "a framework is a polytrain_plugins.Backend here: see docs/writing-a-backend.md"
_JAX = "docs/jax.md says how a training function uses JAX"
_PREDICT = "Result.predict(data) predicts with the model of a checkpoint"
_REMOVED = "Ray Train has removed it; use TorchTrainer with a training function"

ABSENT: Mapping[str, Mapping[str, str]] = {
    "polytrain": {
        "AccelerateTrainer": _REMOVED,
        "Backend": _BACKEND,
        "BackendConfig": _BACKEND,
        "BaseTrainer": "subclass polytrain.DataParallelTrainer",
        "BatchPredictor": _PREDICT,
        "ControllerError": _WORKER_ERRORS,
        "HorovodTrainer": "docs/horovod.md says how a script for Horovod runs",
        "JaxConfig": _JAX,
        "JaxTrainer": _JAX,
        "LightningTrainer": _REMOVED,
        "LoggingConfig": 'use logging.getLogger("polytrain").setLevel(…)',
        "MLflowLoggerCallback": 'use RunConfig(track="mlflow")',
        "NCCLHangError": _WORKER_ERRORS,
        "PreemptionError": "a preemption never fails a run here, and needs no handling",
        "Predictor": _PREDICT,
        "RayTrainError": _WORKER_ERRORS,
        "SessionMisuseError": "outside of a worker polytrain.NotInWorkerError is raised",
        "SyncConfig": "files are stored as they are reported; RunConfig(storage_path=…) says where",
        "TransformersTrainer": _REMOVED,
        "WandbLoggerCallback": 'use RunConfig(track="wandb")',
        "WorkerGroupError": _WORKER_ERRORS,
        **{
            f"get_{name}": f"call get_context().get_{name}()"
            for name in (
                *("local_rank", "local_world_size", "node_rank", "world_rank", "world_size"),
                "experiment_name",
            )
        },
        "horovod": "Ray Train has removed it; use polytrain.torch",
        "session": "its functions are polytrain's own: polytrain.report, get_checkpoint, …",
        "setup_mlflow": 'use RunConfig(track="mlflow")',
        "setup_wandb": 'use RunConfig(track="wandb"), or call wandb.init() on rank 0',
        "v2": "polytrain has one version of its trainers: polytrain.torch, polytrain.xgboost, …",
    },
    "polytrain.Result": {
        "config": "Ray Train has removed it; the script has what it passed as train_loop_config",
    },
    "polytrain.TrainContext": {
        "get_metadata": "Ray Train has removed it; pass values in train_loop_config",
        "get_trial_dir": "get_context().get_storage().experiment_fs_path is the run's directory",
        "get_trial_id": "get_context().get_experiment_name() names the run",
        "get_trial_name": "get_context().get_experiment_name() names the run",
        "get_trial_resources": "ScalingConfig has the resources of a worker; pass what the "
        "function needs in train_loop_config",
    },
    "polytrain.DataParallelTrainer": {
        "can_restore": "fit() resumes a run of the same RunConfig(name=…) and storage_path",
        "get_model": "use Result.load_model()",
        "restore": "fit() resumes a run of the same RunConfig(name=…) and storage_path",
    },
    "polytrain.torch": {
        "TorchCheckpoint": _FILES,
        "TorchftConfig": "a lost worker of torch is replaced by a restart from the newest "
        "checkpoint; ScalingConfig(standby=…) keeps one ready",
        "accelerate": "Ray Train has removed it; use torch.autocast and torch.amp.GradScaler",
        "backward": "Ray Train has removed it; call loss.backward()",
        "prepare_optimizer": "Ray Train has removed it; use the optimizer as it is",
    },
    "polytrain.xgboost": {"XGBoostCheckpoint": _FILES},
    "polytrain.lightgbm": {"LightGBMCheckpoint": _FILES},
    "polytrain.tensorflow": {
        "TensorflowCheckpoint": _FILES,
        "prepare_dataset_shard": "what the shard's to_tf() returns isn't split again, so it needs "
        "no preparation",
    },
    "polytrain.tensorflow.keras": {
        "RayReportCallback": "use ReportCheckpointCallback",
        "TensorflowCheckpoint": _FILES,
    },
    "polytrain.data": {
        "DataIterator": "get_dataset_shard() returns a polytrain_plugins.Shard",
        "Dataset": "datasets={name: …} takes a ray.data.Dataset, files, tables, frames and arrays",
        **dict.fromkeys(
            ("read_parquet", "read_csv", "read_json"),
            'pass the path itself: datasets={"train": "rows.parquet"}, or import ray.data',
        ),
        **dict.fromkeys(
            ("from_pandas", "from_arrow", "from_numpy", "from_items", "from_huggingface"),
            'pass the object itself: datasets={"train": frame}, or import ray.data',
        ),
    },
}


def sentence(module: str, name: str) -> str | None:
    """What to use instead of a name of Ray Train; None if there is nothing to say.

    Args:
        module: where it was looked for, such as "polytrain.torch".
    """
    found = ABSENT.get(module, {}).get(name)
    if found is None:
        return None
    theirs = module.replace("polytrain", "ray.data" if module == "polytrain.data" else "ray.train")
    theirs = theirs.replace("ray.data.data", "ray.data")
    return f"polytrain has no counterpart of {theirs}.{name}: {found}."
