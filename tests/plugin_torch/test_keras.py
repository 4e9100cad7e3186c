"""Keras on torch: whose gradients are averaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tests.e2e.torch_runs import KERAS_ON_TORCH, TorchWith

from polytrain.testing.local_world import RankRecord, WorldRecord, run_world


def world(train: Any, path: Path) -> WorldRecord:
    """Two ranks of a training function."""
    return run_world(
        TorchWith(timeout_s=60, libraries=(KERAS_ON_TORCH,)),
        data=pa.table({"x": [1.0, 2.0]}),
        path=path / "world",
        training_function=train,
        training_config={},
    )


def ranks_of(train: Any, path: Path) -> tuple[RankRecord, ...]:
    """Those ranks, none of which fails."""
    ranks = world(train, path).ranks
    failures = [str(rank.failure) for rank in ranks if rank.failure]
    assert not failures, "\n".join(failures)
    return ranks


def test_one_rank_stops_all(tmp_path: Path) -> None:
    """In the middle of an epoch, by what it alone has seen; and at the end of one."""

    def train(config: Any) -> None:
        import os

        os.environ["KERAS_BACKEND"] = "torch"
        import keras
        import numpy as np
        import pytest

        import polytrain
        from polytrain_torch.keras import prepare_model

        rank = polytrain.get_context().get_world_rank()

        class Counts(keras.callbacks.Callback):
            batches = 0

            def arrange(self, given: Any) -> None:
                # As a ReportCallback does if no epochs are left.
                given["epochs"] = 3

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                self.batches += 1

        class Stops(keras.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                self.model.stop_training = rank == 1

        class OwnFit(keras.Sequential):  # type: ignore[misc]  # keras has no types
            def fit(self, rows: Any, epochs: int, **options: Any) -> Any:
                return super().fit(*rows, epochs=epochs, **options)

        def batches(y: Any, stops: Any) -> int:
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile(optimizer="sgd", loss="mse")
            counts = Counts()
            model = prepare_model(model)
            model.fit(np.ones((8, 1)), y, 2, 9, shuffle=False, verbose=0, callbacks=[stops, counts])
            with pytest.raises(ValueError, match="1 of 2 ranks have a ReportCallback"):
                model.fit(np.ones((8, 1)), y, callbacks=[counts] if rank == 0 else None)
            with pytest.raises(TypeError, match="positional"):
                model.fit(*[None] * 30)
            with pytest.raises(TypeError, match="multiple values"):
                model.fit(np.ones((8, 1)), y, y=y)
            return counts.batches

        def batches_of_own_fit() -> int:
            model = OwnFit([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile(optimizer="sgd", loss="mse")
            counts = Counts()
            prepare_model(model).fit((np.ones((8, 1)), np.ones(8)), 9, callbacks=[counts])
            return counts.batches

        y = np.ones(8)
        at_the_end = batches(y, Stops())
        y[4 if rank == 1 else 0] = np.nan if rank == 1 else 1.0
        both = [at_the_end, batches(y, keras.callbacks.TerminateOnNaN())]
        polytrain.report({"batches": both, "own": batches_of_own_fit()})

    for rank in ranks_of(train, tmp_path):
        assert rank.reports[0].metrics == {"batches": [4, 3], "own": 3}


def test_what_is_unfrozen_later_stays_the_same_on_all_ranks(tmp_path: Path) -> None:
    """The usual transfer recipe: train a new layer first, then all of them."""

    def train(config: Any) -> None:
        import os

        os.environ["KERAS_BACKEND"] = "torch"
        import keras
        import numpy as np

        import polytrain
        from polytrain_torch.keras import prepare_model

        rank = polytrain.get_context().get_world_rank()
        keras.utils.set_random_seed(rank)
        base, head = keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)
        base.trainable = False
        model = keras.Sequential([keras.Input((3,)), base, keras.layers.BatchNormalization(), head])
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
        prepare_model(model)
        x = np.random.default_rng(rank).normal(size=(16, 3)).astype("float32")
        frozen = [array.tolist() for array in base.get_weights()]

        def fit() -> None:
            model.fit(x, x.sum(1), batch_size=8, epochs=2, shuffle=False, verbose=0)

        fit()
        still = [array.tolist() for array in base.get_weights()] == frozen
        base.trainable = True
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
        fit()
        moved = [array.tolist() for array in base.get_weights()] != frozen
        weights = [np.asarray(value).ravel().tolist() for value in model.get_weights()[:2]]
        polytrain.report({"still": still, "moved": moved, "weights": weights})

    first, second = (rank.reports[0].metrics for rank in ranks_of(train, tmp_path))
    assert first == second
    assert first["still"]
    assert first["moved"]


def test_layers_that_only_some_ranks_use(tmp_path: Path) -> None:
    """Gradients are matched by their parameters, as plain DDP does it."""

    def train(config: Any) -> None:
        import os

        os.environ["KERAS_BACKEND"] = "torch"
        import keras
        import numpy as np
        import torch

        import polytrain
        from polytrain_torch.keras import prepare_model

        rank = polytrain.get_context().get_world_rank()
        # By step: the layers that each rank uses.
        used = [[(0, 1), (2, 1)], [(1,), (0, 2)], [(0,), (0,)]]

        def branches(layers: Any, step: int, x: Any) -> Any:
            return sum(layers[number](x) for number in used[step][rank])

        class Deep(keras.Model):  # type: ignore[misc]  # keras has no types
            def __init__(self) -> None:
                super().__init__()
                self.all = [keras.layers.Dense(1) for _ in range(4)]
                for layer in self.all:
                    layer.build((None, 3))
                self.step, self.built = 0, True

            def call(self, x: Any) -> Any:
                return branches(self.all, self.step, x)

        class Plain(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.all = torch.nn.ModuleList([torch.nn.Linear(3, 1) for _ in range(4)])

            def forward(self, x: Any, step: int) -> Any:
                return branches(self.all, step, x)

        class Steps(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                self.model.step = batch

        # So layers have other names on rank 1, in another order.
        for _ in range(8 * rank):
            keras.layers.Dense(1)
        keras.utils.set_random_seed(0)
        x = np.random.default_rng(rank).normal(size=(len(used), 3)).astype("float32")
        y = x.sum(axis=1, keepdims=True)
        plain, model = Plain(), Deep()
        for layer, theirs in zip(model.all, plain.all, strict=True):
            layer.set_weights([theirs.weight.detach().numpy().T, theirs.bias.detach().numpy()])
        optimizer = keras.optimizers.SGD(0.1)
        model.compile(optimizer=optimizer, loss="mse", run_eagerly=True)
        prepare_model(model).fit(x, y, batch_size=1, shuffle=False, verbose=0, callbacks=[Steps()])

        wrapped = torch.nn.parallel.DistributedDataParallel(plain, find_unused_parameters=True)
        sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(len(used)):
            sgd.zero_grad()
            (
                wrapped(torch.tensor(x[step]), step) - torch.tensor(y[step])
            ).square().mean().backward()
            sgd.step()

        flat = [[*each.get_weights()[0].ravel(), *each.get_weights()[1]] for each in model.all]
        expected = [[*each.weight.detach().ravel(), *each.bias.detach()] for each in plain.all]
        polytrain.report({"ours": np.ravel(flat).tolist(), "plain": np.ravel(expected).tolist()})

    for rank in ranks_of(train, tmp_path):
        metrics = rank.reports[0].metrics
        np.testing.assert_allclose(metrics["ours"], metrics["plain"], atol=1e-6)


def test_ranks_with_different_models_are_reported(tmp_path: Path) -> None:
    def train(config: Any) -> None:
        import os

        os.environ["KERAS_BACKEND"] = "torch"
        import keras

        import polytrain
        from polytrain_torch.keras import prepare_model

        units = 4 + polytrain.get_context().get_world_rank()
        prepare_model(keras.Sequential([keras.Input((3,)), keras.layers.Dense(units)]))

    record = world(train, tmp_path)
    found = " ".join(str(rank.failure) for rank in record.ranks)
    assert "rank 0 has" in found
    assert "dense/kernel of shape (3, 5). Build the same model on every rank" in found


def test_statistics_are_those_of_all_ranks(tmp_path: Path) -> None:
    """Their mean: each rank's BatchNormalization sees its own rows. Evaluations have it too.

    What rank 0 alone evaluates is known to the callbacks of all ranks. Each rank draws other random
    numbers, and rank 0 those of one process.
    """

    def train(config: Any) -> None:
        import os

        os.environ["KERAS_BACKEND"] = "torch"
        import keras
        import numpy as np

        import polytrain
        from polytrain_torch.keras import prepare_model

        def built() -> Any:
            layers = [keras.layers.BatchNormalization(), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((1,)), *layers])
            model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
            return model

        def drawn(prepare: Any) -> float:
            noise = keras.layers.GaussianNoise(1.0, seed=0)
            model = prepare(keras.Sequential([keras.Input((1,)), noise]))
            return float(model(np.zeros((1, 1)), training=True)[0, 0])

        def statistics(model: Any) -> list[float]:
            return [float(each[0]) for each in model.get_weights()[2:4]]

        rows = [np.arange(8.0).reshape(8, 1), 3 * np.arange(8.0).reshape(8, 1)]
        options = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
        alone = []
        for x in rows:
            model = built()
            model.fit(x, x[:, 0], **options)
            alone.append(statistics(model))
        rank = polytrain.get_context().get_world_rank()
        x = rows[rank]
        shared = prepare_model(built())
        validation_data = (x, x[:, 0]) if rank == 0 else None
        fitted = shared.fit(x, x[:, 0], validation_data=validation_data, **options)
        polytrain.report(
            {
                "ours": statistics(shared),
                "expected": np.mean(alone, axis=0).tolist(),
                "val_loss": fitted.history["val_loss"][-1],
                "evaluated": shared.evaluate(rows[0], rows[0][:, 0], verbose=0),
                "drawn": drawn(prepare_model),
                "drawn alone": drawn(lambda model: model),
            }
        )

    by_rank = [rank.reports[0].metrics for rank in ranks_of(train, tmp_path)]
    assert [each["drawn"] == each["drawn alone"] for each in by_rank] == [True, False]
    for metrics in by_rank:
        np.testing.assert_allclose(metrics["ours"], metrics["expected"], rtol=1e-5)
        np.testing.assert_allclose(metrics["val_loss"], metrics["evaluated"], rtol=1e-5)
