"""A run whose every step can be compared with that of another run: `cuts_driver.py JSON`.

Each rank records the rows of a step before it trains on them. The model goes into each report as a
digest, and so does the sum over all rows that were used.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import polytrain
from polytrain import Checkpoint, FailureConfig, RunConfig, ScalingConfig, Trainer
from polytrain.testing.contract import kit_table
from polytrain.testing.injection import FaultPlan, WithFaults, current_injection, sum_over_ranks
from polytrain.testing.rows import GLOBAL_BATCH, digest
from polytrain_plugins import load_backend

_FEATURES = ("x0", "x1", "x2")


class SumModel:
    """Nothing but the sum of what the ranks have seen."""

    def __init__(self, saved: bytes | None) -> None:
        self._sum = json.loads(saved) if saved else 0

    def learn(self, batch: Mapping[str, Any], step: int) -> None:
        [more] = sum_over_ranks([round(1000 * float(batch["label"].sum())) * step % 1_000_003])
        self._sum += more

    def saved(self) -> bytes:
        return json.dumps(self._sum).encode()


class TorchModel:
    """A linear model, in DDP."""

    def __init__(self, saved: bytes | None) -> None:
        import io

        import torch

        from polytrain_torch import prepare_model

        torch.manual_seed(0)
        self._own = torch.nn.Linear(len(_FEATURES), 1)
        if saved:
            self._own.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True))
        self._model = prepare_model(self._own)
        self._optimizer = torch.optim.SGD(self._own.parameters(), lr=0.1)

    def learn(self, batch: Mapping[str, Any], step: int) -> None:
        import torch

        columns = [torch.as_tensor(batch[name], dtype=torch.float32) for name in _FEATURES]
        labels = torch.as_tensor(batch["label"], dtype=torch.float32)
        loss = (self._model(torch.stack(columns, dim=1))[:, 0] - labels).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def saved(self) -> bytes:
        import io

        import torch

        written = io.BytesIO()
        torch.save(self._own.state_dict(), written)
        return written.getvalue()


class XGBoostModel:
    """A tree for each step."""

    def __init__(self, saved: bytes | None) -> None:
        import xgboost

        self._booster: Any = xgboost.Booster(model_file=bytearray(saved)) if saved else None

    def learn(self, batch: Mapping[str, Any], step: int) -> None:
        import numpy as np
        import xgboost

        columns = np.stack([batch[name] for name in _FEATURES], axis=1)
        parameters = {"max_depth": 2, "nthread": 1, "objective": "binary:logistic"}
        rows = xgboost.DMatrix(columns, batch["label"])
        self._booster = xgboost.train(parameters, rows, 1, xgb_model=self._booster)

    def saved(self) -> bytes:
        return bytes(self._booster.save_raw("ubj"))


class LightGBMModel:
    """A tree for each step."""

    def __init__(self, saved: bytes | None) -> None:
        import lightgbm

        self._booster: Any = lightgbm.Booster(model_str=saved.decode()) if saved else None

    def learn(self, batch: Mapping[str, Any], step: int) -> None:
        import lightgbm
        import numpy as np

        from polytrain_lightgbm import network_params

        columns = np.stack([batch[name] for name in _FEATURES], axis=1)
        parameters = {"objective": "binary", "num_leaves": 4, "num_threads": 1, "verbosity": -1}
        rows = lightgbm.Dataset(columns, batch["label"], params={"min_data_in_leaf": 2})
        self._booster = lightgbm.train(
            {**parameters, **network_params()}, rows, 1, init_model=self._booster
        )

    def saved(self) -> bytes:
        # Its parameters have the ports of the network.
        model: str = self._booster.model_to_string().partition("parameters:")[0]
        return model.encode()


class TensorFlowModel:
    """A linear model, whose gradients the strategy adds up."""

    def __init__(self, saved: bytes | None) -> None:
        import numpy as np
        import tensorflow as tf

        from polytrain_tf import strategy

        size = len(_FEATURES)
        self._weights: Any = (
            np.frombuffer(saved, np.float32) if saved else np.zeros(size, np.float32)
        )
        self._strategy = strategy()

        def added_up(gradient: Any) -> Any:
            # An argument of a function is on no device.
            mine = tf.identity(gradient)
            return tf.distribute.get_replica_context().all_reduce("sum", mine)

        self._added_up = tf.function(
            lambda gradient: self._strategy.run(added_up, args=(gradient,)),
            input_signature=[tf.TensorSpec([size], tf.float32)],
            autograph=False,
        )

    def learn(self, batch: Mapping[str, Any], step: int) -> None:
        import numpy as np

        columns = np.stack([batch[name] for name in _FEATURES], axis=1).astype(np.float32)
        errors = columns @ self._weights - np.asarray(batch["label"], np.float32)
        gradient = np.asarray(self._added_up(columns.T @ errors))
        self._weights = self._weights - np.float32(0.001) * gradient

    def saved(self) -> bytes:
        return bytes(self._weights.tobytes())


class Model(Protocol):
    """What is trained, all ranks together."""

    def learn(self, batch: Mapping[str, Any], step: int) -> None: ...

    def saved(self) -> bytes:
        """The model, the same on each rank."""


MODELS: Mapping[str, Callable[[bytes | None], Model]] = {
    "lightgbm": LightGBMModel,
    "reference": SumModel,
    "tensorflow": TensorFlowModel,
    "torch": TorchModel,
    "xgboost": XGBoostModel,
}


def train(config: dict[str, Any]) -> None:
    rank = polytrain.get_context().get_world_rank()
    shard = polytrain.get_dataset_shard("train")
    state, saved = {"step": 0, "rows": 0, "digest": 0}, None
    if checkpoint := polytrain.get_checkpoint():
        with checkpoint.as_directory() as directory:
            state = json.loads(Path(directory, "state.json").read_text())
            saved = Path(directory, "model").read_bytes()
    model = MODELS[config["backend"]](saved)
    name = f"{current_injection().attempt:04d}-{rank}.jsonl"
    with Path(config["directory"], "diary", name).open("w") as diary:
        print(json.dumps({"start": state["step"]}), file=diary, flush=True)
        while True:
            for batch in shard.iter_batches(global_batch_size=GLOBAL_BATCH):
                rows, step = batch["x0"].tolist(), state["step"] + 1
                print(json.dumps({"step": step, "rows": rows}), file=diary, flush=True)
                model.learn(batch, step)
                is_over = step == config["steps"] or Path(config["directory"], "end").exists()
                count, total, over = sum_over_ranks([len(rows), digest(rows), is_over])
                state = {
                    "step": step,
                    "rows": state["rows"] + count,
                    "digest": state["digest"] + total,
                }
                written = model.saved()
                found = hashlib.sha256(written).hexdigest()
                with tempfile.TemporaryDirectory() as directory:
                    Path(directory, "state.json").write_text(json.dumps(state))
                    Path(directory, "model").write_bytes(written)
                    kept = Checkpoint.from_directory(directory) if rank == 0 else None
                    polytrain.report({**state, "model": found}, checkpoint=kept)
                if over:
                    return
                time.sleep(config["pause_s"])


def main() -> None:
    config = json.loads(sys.argv[1])
    directory = Path(config["directory"])
    (directory / "diary").mkdir(exist_ok=True)
    plan = FaultPlan(directory=directory)
    Trainer(
        WithFaults(inner=load_backend(config["backend"])(), plan=plan),
        train,
        train_loop_config=config,
        datasets={"train": kit_table()},
        scaling_config=ScalingConfig(
            num_workers=2,
            standby=config["standby"],
            placement_strategy="SPREAD",
            cluster=config["cluster"],
        ),
        run_config=RunConfig(
            name="run",
            storage_path=directory,
            # The hosts are sound, however often they are lost.
            failure_config=FailureConfig(max_failures=-1, node_cooldown_s=0),
            observers=(plan.clock,),
            progress=False,
        ),
    ).fit()
    print("FINISHED")


if __name__ == "__main__":
    main()
