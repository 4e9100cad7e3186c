"""Who bench_boosters measures, each in a process of its own: from Parquet files to a model file.

Run as a script, it is one of them. All are given two threads, the same rows and parameters, and
evaluate nothing. Nothing but the standard library is imported before the clock starts, and of what
is imported later, a framework or a trainer counts as training, what starts the cluster doesn't.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

WORKERS = 2
LOGICAL_CPUS = 2 * WORKERS
"""Of Ray. Workers take half of them; Ray Data reads with the others."""

PARAMS: Mapping[str, Mapping[str, Any]] = {
    "xgboost": {
        "objective": "binary:logistic",
        "tree_method": "hist",
        "learning_rate": 0.1,
        "max_depth": 8,
    },
    "lightgbm": {
        "objective": "binary",
        "learning_rate": 0.1,
        "num_leaves": 127,
        "verbosity": -1,
    },
}
MODEL_FILES = {"xgboost": "model.ubj", "lightgbm": "model.txt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a process is to do."""

    party: str
    backend: str
    rounds: int
    data: str
    """Directory of Parquet files."""

    label: str
    directory: str
    """The process's own."""

    watched: bool
    """Measure memory too, which takes time."""

    @property
    def params(self) -> dict[str, Any]:
        """The framework's, without a number of threads."""
        return dict(PARAMS[self.backend])

    @property
    def model(self) -> Path:
        """Where a party writes its model that has no place for it."""
        return Path(self.directory, MODEL_FILES[self.backend])


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a process has done. Times are seconds since 1970."""

    up: float
    """When the cluster was there."""

    done: float
    """When the model's file was there."""

    model: str
    before: int = 0
    """Bytes of memory when the cluster was there, if it was watched."""

    peak: int = 0
    """And at most."""

    accounts: Mapping[str, float] = field(default_factory=dict)
    """Where the time went, if the party knows."""


Trained = tuple[Path, Mapping[str, float]]
"""The model's file, and where the time went."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """One who trains."""

    cluster: Callable[[], AbstractContextManager[Any]]
    """Has one up as long as it is entered."""

    train: Callable[[Task, Any], Trained]
    """Takes what entering the cluster has given."""


@contextlib.contextmanager
def _no_cluster() -> Iterator[None]:
    yield


def _ray() -> AbstractContextManager[None]:
    from harness import running_ray

    return running_ray(num_cpus=LOGICAL_CPUS)


@contextlib.contextmanager
def _dask() -> Iterator[Any]:
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(WORKERS)
        yield client


def _train_ours(task: Task, _: None) -> Trained:
    from polytrain import RunConfig, ScalingConfig, make_trainer

    trainer = make_trainer(
        task.backend,
        params=task.params,
        num_boost_round=task.rounds,
        label=task.label,
        eval_train=False,
        datasets={"train": task.data},
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(storage_path=Path(task.directory, "runs"), progress=False),
    )
    result = trainer.fit()
    assert result.checkpoint is not None
    accounts = {name: seconds for name, seconds in result.ledger.seconds.items() if seconds}
    return Path(result.checkpoint.path, MODEL_FILES[task.backend]), accounts


def _train_alone(task: Task, _: None) -> Trained:
    import pyarrow as pa

    pa.set_cpu_count(WORKERS)
    return {"xgboost": _xgboost_alone, "lightgbm": _lightgbm_alone}[task.backend](task)


def _xgboost_alone(task: Task) -> Trained:
    import pyarrow.parquet as pq
    import xgboost

    begun = time.time()
    table = pq.read_table(task.data)
    features, label = table.drop_columns([task.label]), table[task.label].to_numpy()
    read = time.time()
    matrix = xgboost.QuantileDMatrix(features, label=label, nthread=WORKERS)
    binned = time.time()
    booster = xgboost.train({**task.params, "nthread": WORKERS}, matrix, task.rounds)
    booster.save_model(task.model)
    return task.model, _accounts(begun, read, binned)


def _lightgbm_alone(task: Task) -> Trained:
    import lightgbm
    import numpy as np
    import pyarrow.parquet as pq

    begun = time.time()
    table = pq.read_table(task.data)
    features = table.drop_columns([task.label])
    matrix = np.column_stack([column.to_numpy() for column in features.columns])
    read = time.time()
    params = {**task.params, "num_threads": WORKERS}
    names = features.column_names
    rows = lightgbm.Dataset(matrix, table[task.label].to_numpy(), feature_name=names, params=params)
    rows.construct()
    binned = time.time()
    lightgbm.train(params, rows, task.rounds).save_model(task.model)
    return task.model, _accounts(begun, read, binned)


def _accounts(begun: float, read: float, binned: float) -> dict[str, float]:
    return {"read": read - begun, "bin": binned - read, "boost": time.time() - binned}


def _train_by_dask(task: Task, client: Any) -> Trained:
    import dask.dataframe

    frame = dask.dataframe.read_parquet(task.data).persist()
    features, label = frame.drop(columns=task.label), frame[task.label]
    if task.backend == "xgboost":
        from xgboost import dask as xgboost_dask

        matrix = xgboost_dask.DaskQuantileDMatrix(client, features, label)
        trained = xgboost_dask.train(client, task.params, matrix, num_boost_round=task.rounds)
        trained["booster"].save_model(task.model)
    else:
        from lightgbm.dask import DaskLGBMClassifier

        model = DaskLGBMClassifier(client=client, n_estimators=task.rounds, **task.params)
        model.fit(features, label)
        model.booster_.save_model(task.model)
    return task.model, {}


def _train_by_ray_train(task: Task, _: None) -> Trained:
    import importlib

    import ray.data
    import ray.train

    module = importlib.import_module(f"ray.train.{task.backend}")
    name, function = {
        "xgboost": ("XGBoostTrainer", _ray_xgboost_function),
        "lightgbm": ("LightGBMTrainer", _ray_lightgbm_function),
    }[task.backend]
    trainer = getattr(module, name)(
        function(),
        train_loop_config={"params": task.params, "rounds": task.rounds, "label": task.label},
        datasets={"train": ray.data.read_parquet(task.data)},
        scaling_config=ray.train.ScalingConfig(num_workers=WORKERS),
        run_config=ray.train.RunConfig(storage_path=str(Path(task.directory, "runs"))),
    )
    result = trainer.fit()
    return Path(result.checkpoint.path, MODEL_FILES[task.backend]), {}


def _ray_xgboost_function() -> Callable[[dict[str, Any]], None]:
    """As in Ray Train's own example. Made here so that it travels by value."""

    def train(config: dict[str, Any]) -> None:
        import ray.train
        import xgboost
        from ray.train.xgboost import RayTrainReportCallback

        frame = ray.train.get_dataset_shard("train").materialize().to_pandas()
        features, label = frame.drop(config["label"], axis=1), frame[config["label"]]
        xgboost.train(
            {**config["params"], "nthread": 1},
            xgboost.DMatrix(features, label=label, nthread=1),
            config["rounds"],
            callbacks=[RayTrainReportCallback()],
        )

    return train


def _ray_lightgbm_function() -> Callable[[dict[str, Any]], None]:
    """As in Ray Train's own example. Made here so that it travels by value."""

    def train(config: dict[str, Any]) -> None:
        import lightgbm
        import ray.train
        from ray.train.lightgbm import (
            RayTrainReportCallback,
            get_network_params,
            normalize_pandas_for_lightgbm,
        )

        shard = ray.train.get_dataset_shard("train").materialize()
        frame = normalize_pandas_for_lightgbm(shard.to_pandas())
        features, label = frame.drop(config["label"], axis=1), frame[config["label"]]
        network = {"tree_learner": "data_parallel", "pre_partition": True, **get_network_params()}
        lightgbm.train(
            {**config["params"], "num_threads": 1, **network},
            lightgbm.Dataset(features, label=label),
            config["rounds"],
            callbacks=[RayTrainReportCallback()],
        )

    return train


PARTIES = {
    "ours": Party(cluster=_ray, train=_train_ours),
    "alone": Party(cluster=_no_cluster, train=_train_alone),
    "dask": Party(cluster=_dask, train=_train_by_dask),
    "ray-train": Party(cluster=_ray, train=_train_by_ray_train),
}


def _carried_out(task: Task) -> Training:
    party = PARTIES[task.party]
    with party.cluster() as cluster:
        if not task.watched:
            up = time.time()
            model, accounts = party.train(task, cluster)
            return Training(up=up, done=time.time(), model=str(model), accounts=accounts)

        from harness import start_workers
        from memory import Watch

        if party.cluster is _ray:
            start_workers(LOGICAL_CPUS)
        with Watch() as watch:
            up = time.time()
            model, accounts = party.train(task, cluster)
            done = time.time()
        return Training(
            up=up,
            done=done,
            model=str(model),
            before=watch.memory.before,
            peak=watch.memory.peak,
            accounts=accounts,
        )


def main() -> None:
    """Do what the command line says, and tell it in `result.json` of the task's directory."""
    task = Task(**json.loads(sys.argv[1]))
    # As many cores as threads, for all processes that come of this one.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:WORKERS])
    found = _carried_out(task)
    Path(task.directory, "result.json").write_text(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
