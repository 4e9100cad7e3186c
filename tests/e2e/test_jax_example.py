"""The example of a backend that isn't ours trains and passes the kit, from outside the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "jax_backend"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the example is installed, a copy of it: nothing of the checkout is used."""
    directory = tmp_path_factory.mktemp("jax")
    shutil.copytree(EXAMPLE, directory / "source")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"),
            *("--no-build-isolation", "--target", directory / "packages", directory / "source"),
        ],
        check=True,
    )
    return directory


def run(installed: Path, *command: str, within_s: float = 240) -> str:
    """Run Python with this command. If it doesn't end in time, its stacks are in the error."""
    path = os.pathsep.join(
        filter(None, [str(installed / "packages"), os.environ.get("PYTHONPATH", "")])
    )
    limit = ("timeout", "--signal=ABRT", str(within_s))
    done = subprocess.run(
        [*limit, sys.executable, "-X", "faulthandler", *command],
        cwd=installed / "source",
        env={**os.environ, "PYTHONPATH": path, "HOME": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


def test_it_trains_and_survives_a_kill(installed: Path) -> None:
    output = run(installed, "train.py")
    # There would be more if it had begun anew.
    assert "workers 2, epochs 6, restarts 1" in output
    assert float(output.split("accuracy ")[1]) > 0.9


KERAS_IN_ONE_PROCESS = """
from pathlib import Path
from sklearn.datasets import load_digits
from train_keras import train
from polytrain import RunConfig, ScalingConfig, make_trainer

images, digits = load_digits(return_X_y=True)
columns = {f"pixel_{number}": pixels for number, pixels in enumerate(images[:512].T)}
result = make_trainer(
    "jax",
    train,
    train_loop_config={"epochs": 3},
    datasets={"train": {**columns, "digit": digits[:512]}},
    scaling_config=ScalingConfig(num_workers=0),
    run_config=RunConfig(progress=False),
).fit()
saved = [path.name for path in Path(result.checkpoint.path).glob("*.keras")]
print(f"epochs {len(result.history)}, saved {', '.join(saved)}")
print(f"accuracy {result.metrics['accuracy']:.3f}")


def never_learns(config):
    import keras
    import numpy as np
    import polytrain
    from polytrain_tf.reporting import ReportCallback, checkpointed_epoch, checkpointed_model

    model = checkpointed_model()
    if model is None:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    ends = keras.callbacks.EarlyStopping(monitor="loss", min_delta=99.0, patience=2)
    ones, begins = np.ones((4, 1)), checkpointed_epoch()
    model.fit(
        ones,
        ones,
        initial_epoch=begins,
        epochs=config["epochs"],
        verbose=0,
        callbacks=[ReportCallback(), ends],
    )


def ended(epochs, **options):
    return make_trainer(
        "jax",
        never_learns,
        train_loop_config={"epochs": epochs},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(progress=False),
        **options,
    ).fit()


begun = ended(2)
over = ended(9, restore_from=begun.checkpoint)
again = ended(9, restore_from=over.checkpoint)
print(f"{len(begun.history)} epochs, {len(over.history)} more, and {len(again.history)}")
"""


def test_keras_trains_on_it(installed: Path) -> None:
    """In one process: a worker imports JAX, Keras and TensorFlow, for many seconds."""
    output = run(installed, "-c", KERAS_IN_ONE_PROCESS)
    assert "epochs 3, saved model.keras" in output
    assert float(output.split("accuracy ")[1].split()[0]) > 0.7
    # `EarlyStopping` counts on, and what it has ended stays so.
    assert "2 epochs, 1 more, and 0" in output


@pytest.mark.only_in_sweep
def test_keras_trains_on_it_and_survives_a_kill(installed: Path) -> None:
    output = run(installed, "train_keras.py")
    assert "epochs 6, restarts 1, saved model.keras" in output
    assert float(output.split("accuracy ")[1]) > 0.9


# In `make test`, `test_new_backend` has all of the kit pass outside the tree.
@pytest.mark.only_in_sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tiers", ["not chaos", "chaos"])
def test_it_passes_the_kit(installed: Path, tiers: str) -> None:
    output = run(installed, "-m", "pytest", "-v", "-k", tiers, "tests", within_s=540)
    assert " passed" in output
    assert "failed" not in output
