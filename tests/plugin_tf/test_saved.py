"""Keras models in checkpoints: what is written of them, and what is read."""

from __future__ import annotations

import json
import shutil
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from polytrain import CheckpointError
from polytrain_tf import keras_callback
from polytrain_tf.backend import TensorFlow
from polytrain_tf.saved import (
    Progress,
    load,
    load_into,
    load_to_resume,
    progress_of,
    save,
)

X = np.ones((4, 3), dtype="float32")


def build() -> Any:
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, kernel_initializer="ones"),
            keras.layers.Dropout(0.5, seed=1),
            keras.layers.Dense(1, kernel_initializer="ones"),
        ]
    )
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    return model


def trained(epochs: int) -> Any:
    model = build()
    model.fit(X, X.sum(axis=1), epochs=epochs, verbose=0)
    return model


def test_a_checkpoint_within_an_epoch_leaves_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keras reports an epoch's from what its batches have added up."""
    monkeypatch.setattr(keras_callback, "reported", lambda metrics: nullcontext(tmp_path))
    saves = keras_callback.ReportCheckpointCallback("train_batch_end", report_metrics_on=())

    def history(*callbacks: Any) -> Any:
        fitted = build().fit(
            X, np.arange(4), batch_size=2, epochs=2, shuffle=False, verbose=0, callbacks=callbacks
        )
        return fitted.history

    assert history(saves) == history()


def test_equal_models_make_equal_files(tmp_path: Path) -> None:
    """Without the dates and the addresses in memory that Keras writes."""
    files = []
    # Both exist all the time, at different addresses.
    for name, shared in {each: keras.DTypePolicy("float32") for each in ("one", "other")}.items():
        layers = [
            # Without names Keras would number the second ones.
            keras.layers.Dense(1, dtype=shared, name="dense"),
            keras.layers.Dropout(0.5, seed=1, dtype=shared, name="dropout"),
        ]
        model = keras.Sequential([keras.Input((3,), name="input"), *layers], name="model")
        model.set_weights([np.ones((3, 1)), np.zeros(1)])
        model.compile(optimizer=keras.optimizers.Adam(name="adam"), loss="mse", metrics=["mae"])
        model.optimizer.build(model.trainable_variables)
        (tmp_path / name).mkdir()
        save(model, tmp_path / name, Progress(epochs=2))
        files.append(tmp_path / name / "model.keras")
    assert files[0].read_bytes() == files[1].read_bytes()
    with zipfile.ZipFile(files[0]) as opened:
        assert {each.date_time for each in opened.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert "date_saved" not in json.loads(opened.read("metadata.json"))


def test_layers_go_on_with_their_random_numbers(tmp_path: Path) -> None:
    model = trained(epochs=2)
    save(model, tmp_path, Progress(epochs=2, is_over=True))
    assert progress_of(tmp_path) == Progress(epochs=2, is_over=True)
    into = build()
    into.optimizer.build(into.trainable_variables)
    load_into(into, tmp_path)
    for other in (load(tmp_path), into):
        assert other.optimizer.iterations == 2
        for expected, message in zip(model.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_array_equal(message, expected)
    drawn = model(X, training=True)
    np.testing.assert_array_equal(load(tmp_path)(X, training=True), drawn)
    np.testing.assert_array_equal(into(X, training=True), drawn)


def test_layers_go_on_with_what_keras_sums_up_or_resets(tmp_path: Path) -> None:
    """The weights of LoRA, and the states of a stateful layer."""
    rows = np.random.default_rng(0).normal(size=(8, 5, 3))

    def fit(model: Any) -> None:
        model.fit(rows, rows.sum(axis=(1, 2)), batch_size=4, shuffle=False, verbose=0)

    head = keras.layers.Dense(1)
    lstm = keras.layers.LSTM(4, stateful=True)
    model = keras.Sequential([keras.Input((5, 3), batch_size=4), lstm, head])
    head.enable_lora(1)
    model.compile(optimizer="adam", loss="mse")
    fit(model)
    save(model, tmp_path, Progress(epochs=1))
    resumed = load_to_resume(tmp_path)
    for each in (model, resumed):
        fit(each)
    for expected, weights in zip(model.get_weights(), resumed.get_weights(), strict=True):
        np.testing.assert_array_equal(weights, expected)


def test_lora_in_a_sublayer_is_loaded_as_the_sum(tmp_path: Path) -> None:
    """A loaded model has no LoRA there: Keras enables it only in layers with a configuration."""

    def attending() -> Any:
        attention = keras.layers.MultiHeadAttention(2, 2)
        rows = keras.Input((5, 3))
        made = keras.layers.Dense(1)(keras.layers.Flatten()(attention(rows, rows)))
        model = keras.Model(rows, keras.layers.Dropout(0.5, seed=1)(made))
        attention._query_dense.enable_lora(1)
        model.compile(optimizer="adam", loss="mse")
        return model

    rows = np.random.default_rng(0).normal(size=(8, 5, 3))
    model = attending()
    model.fit(rows, rows.sum(axis=(1, 2)), verbose=0)
    save(model, tmp_path, Progress(epochs=1))
    loaded, into = load(tmp_path), attending()
    load_into(into, tmp_path)
    np.testing.assert_allclose(
        loaded.predict(rows, verbose=0), model.predict(rows, verbose=0), rtol=1e-5
    )
    np.testing.assert_array_equal(loaded(rows, training=True) == 0, into(rows, training=True) == 0)
    for expected, weights in zip(model.weights, into.weights, strict=True):
        np.testing.assert_array_equal(weights, expected)
    with pytest.raises(CheckpointError, match=r"LoRA again in multi_head_attention\w*/query when"):
        load_to_resume(tmp_path)


def test_a_file_with_only_the_states_of_generators_is_loaded(tmp_path: Path) -> None:
    """As checkpoints were written before other variables were added."""
    lstm = keras.layers.LSTM(4, stateful=True)
    dropout = keras.layers.Dropout(0.5, seed=1)
    model = keras.Sequential([keras.Input((5, 3), batch_size=4), lstm, dropout])
    model.compile(optimizer="adam", loss="mse")
    model.optimizer.build(model.trainable_variables)
    model(np.ones((4, 5, 3)), training=True)
    save(model, tmp_path, Progress())
    seeds = [each for each in model.variables if each.path.endswith("seed_generator_state")]
    np.savez(tmp_path / "seeds.npz", *map(np.asarray, seeds))
    loaded = load_to_resume(tmp_path)
    lstm.reset_states()
    for expected, values in zip(model.variables, loaded.variables, strict=True):
        np.testing.assert_array_equal(values, expected)
    np.savez(tmp_path / "seeds.npz")
    with pytest.raises(
        CheckpointError, match=r"has no states of 2 of its random number generators"
    ):
        load(tmp_path)


def test_a_model_alone_is_loaded(tmp_path: Path) -> None:
    """As a training function may have written it."""
    model = trained(epochs=1)
    (tmp_path / "whole").mkdir()
    save(model, tmp_path / "whole", Progress(epochs=1))
    shutil.copy(tmp_path / "whole" / "model.keras", tmp_path)
    np.testing.assert_array_equal(load(tmp_path).predict(X, verbose=0), model.predict(X, verbose=0))


def test_loading_runs_no_code_from_the_file(tmp_path: Path) -> None:
    """A layer can hold Python code, and an array of objects a pickle."""
    mark = tmp_path / "mark"
    bomb = eval(f"lambda x: __import__('os').mkdir({str(mark)!r}) or x")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Lambda(bomb)])
    mark.rmdir()  # the layer has run it to know what it returns
    save(model, tmp_path, Progress())
    with pytest.raises(ValueError, match="lambda"):
        load(tmp_path)
    assert not mark.exists()
    save(build(), tmp_path, Progress())
    np.savez(tmp_path / "seeds.npz", np.array([Path()], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        load(tmp_path)


@pytest.mark.parametrize(
    "named",
    [
        # Called with a path, it loads a SavedModel, whose graph may write any file.
        {"class_name": "function", "config": "TFSMLayer", "module": "keras.layers"},
        {"class_name": "function", "config": "TFSMLayer", "module": "keras.src.export.tfsm_layer"},
        # Keras finds a function also where a file names a class.
        {"class_name": "plot_model", "config": {}, "module": "keras.utils"},
    ],
)
def test_a_file_calls_no_function_that_opens_others(named: Any, tmp_path: Path) -> None:
    entry = keras.Input((3,), name="entry")
    layer = keras.layers.Lambda(keras.activations.relu, name="layer")
    save(keras.Model(entry, layer(entry)), tmp_path, Progress())
    np.testing.assert_array_equal(load(tmp_path)(-X), np.maximum(-X, 0))
    with zipfile.ZipFile(tmp_path / "model.keras") as file:
        members = {name: file.read(name) for name in file.namelist()}
    config = json.loads(members["config.json"])
    (changed,) = (each for each in config["config"]["layers"] if each["name"] == "layer")
    changed["config"]["function"] = named
    changed["inbound_nodes"] = [{"args": [], "kwargs": {"inputs": str(tmp_path)}}]
    with zipfile.ZipFile(tmp_path / "model.keras", "w") as file:
        for name, content in {**members, "config.json": json.dumps(config).encode()}.items():
            file.writestr(name, content)
    with pytest.raises(CheckpointError, match=rf"names {named['module']}\.\w+ as a function"):
        load(tmp_path)


def test_a_keras_that_could_run_code_from_a_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(build(), tmp_path, Progress())
    monkeypatch.setattr(keras, "__version__", "3.14.0")
    with pytest.raises(CheckpointError, match=r"Keras 3\.14\.0.*pip install 'keras>=3\.15'"):
        load(tmp_path)


def test_a_model_of_tf_keras_is_saved_and_names_its_library(tmp_path: Path) -> None:
    """Ray Train's scripts use tf_keras."""
    import tf_keras

    model = tf_keras.Sequential([tf_keras.layers.Input((3,)), tf_keras.layers.Dropout(0.5)])
    model.compile(loss="mse")
    save(model, tmp_path, Progress(epochs=2))
    assert progress_of(tmp_path) == Progress(epochs=2)
    loaded = tf_keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), X)
    with pytest.raises(CheckpointError, match=r"saved by tf_keras 2.*tf_keras\.models\.load_model"):
        load(tmp_path)


@keras.saving.register_keras_serializable()
class Adversaries(keras.Model):
    """Two layers that a step of its own trains, each with an optimizer of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.maker = keras.layers.Dense(3)
        self.critic = keras.layers.Dense(1)
        self.critics = {"critic": keras.optimizers.Adam(0.1)}
        self.make_weights()

    def make_weights(self) -> None:
        self.maker.build((None, 3))
        self.critic.build((None, 3))

    def call(self, x: Any) -> Any:
        return self.maker(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            made = tf.reduce_mean((self.maker(x) - y[:, None]) ** 2)
            judged = tf.reduce_mean((self.critic(x) - y[:, None]) ** 2)
        for optimizer, loss, layer in (
            (self.optimizer, made, self.maker),
            (self.critics["critic"], judged, self.critic),
        ):
            variables = layer.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"made": made, "judged": judged}


class BuiltInTraining(Adversaries):
    """Its critic has no weights until the first step."""

    def make_weights(self) -> None:
        self.maker.build((None, 3))


def adversaries(cls: type[Adversaries]) -> Any:
    keras.utils.set_random_seed(1)
    model = cls()
    model.compile(optimizer=keras.optimizers.Adam(0.1), loss="mse")
    return model


def fitted(model: Any) -> Any:
    model.fit(X, X.sum(axis=1), epochs=2, verbose=0)
    return model


def test_every_optimizer_of_a_model_goes_on_with_its_state(tmp_path: Path) -> None:
    """Keras itself leaves the state of one out that isn't built like the saved one."""
    model = fitted(adversaries(Adversaries))
    save(model, tmp_path, Progress(epochs=2))
    into = adversaries(Adversaries)
    load_into(into, tmp_path)
    others = [into, load_to_resume(tmp_path)]
    fitted(model)
    for other in others:
        fitted(other)
        for expected, weights in zip(model.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_array_equal(weights, expected)


@pytest.mark.parametrize("is_scaled", [False, True])
def test_weights_stay_excluded_from_decay(tmp_path: Path, is_scaled: bool) -> None:
    """Keras's file doesn't tell of them."""
    adamw = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    adamw.exclude_from_weight_decay(var_names=["bias"])
    # As an optimizer of one's own may have.
    adamw.optimizers = None
    dense = keras.layers.Dense(1, kernel_initializer="ones", bias_initializer="ones")
    model = keras.Sequential([keras.Input((3,)), dense])
    scaled = keras.optimizers.LossScaleOptimizer(adamw)
    model.compile(optimizer=scaled if is_scaled else adamw, loss="mse")
    model.optimizer.build(model.trainable_variables)
    save(model, tmp_path, Progress())
    resumed = load_to_resume(tmp_path)
    resumed.optimizer.apply([np.zeros((3, 1), "float32"), np.zeros(1, "float32")])
    kernel, bias = resumed.get_weights()
    assert (kernel < 1.0).all()
    assert bias == 1.0


def test_digests_are_those_of_every_optimizer() -> None:
    model, engine = fitted(adversaries(Adversaries)), TensorFlow().engine()
    before = engine.digests(model)
    changed = model.critics["critic"].variables[-1]
    changed.assign(changed + 1.0)
    now = engine.digests(model)
    [name] = [name for name in before if before[name] != now[name]]
    assert name.endswith(changed.path)


def test_a_model_that_would_lose_weights_on_a_restart_is_refused(tmp_path: Path) -> None:
    save(fitted(adversaries(BuiltInTraining)), tmp_path, Progress(epochs=2))
    into = adversaries(BuiltInTraining)
    with pytest.raises(
        CheckpointError, match=r"2 of its weights .* 4 afterwards.*Build all of its layers"
    ):
        load_into(into, tmp_path)
