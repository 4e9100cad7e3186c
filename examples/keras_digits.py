"""Handwritten digits by Keras, with no training function: two workers, one of them killed.

pip install '.[tf-cpu]' scikit-learn
python examples/keras_digits.py
"""

from __future__ import annotations

from digits import EPOCHS, digits, kill_a_worker, print_result

from polytrain import (
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    get_context,
    make_trainer,
)


def build():
    import keras

    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.layers.Reshape((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def callbacks():
    import keras

    class OneDies(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            kill_a_worker(epoch)

        def on_epoch_end(self, epoch, logs=None):
            logs["workers"] = get_context().get_world_size()

    return [OneDies()]


def main():
    (images, shown), (others, shown_there) = digits()
    result = make_trainer(
        "tensorflow",
        model=build,
        compile={
            "optimizer": "adam",
            "loss": "sparse_categorical_crossentropy",
            "metrics": ["accuracy"],
        },
        epochs=EPOCHS,
        batch_size=32,
        label="shown",
        callbacks=callbacks,
        datasets={
            "train": {"image": images, "shown": shown},
            "valid": {"image": others, "shown": shown_there},
        },
        dataset_config={"train": DataConfig(shuffle=True)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(checkpoint_frequency=1),
        ),
    ).fit()
    print_result(result, result.load_model().predict(others, verbose=0).argmax(1))


if __name__ == "__main__":
    main()
