"""Handwritten digits by a TensorFlow loop: two workers, one of which is killed on the way.

pip install '.[tf-cpu]' scikit-learn
python examples/tensorflow_digits.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from digits import EPOCHS, digits, kill_a_worker, print_result

from polytrain import (
    Checkpoint,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    get_checkpoint,
    get_context,
    get_dataset_shard,
    make_trainer,
    report,
)


def network():
    import keras

    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def train():
    import keras
    import tensorflow as tf

    import polytrain_tf

    strategy = polytrain_tf.strategy()
    with strategy.scope():
        model = network()
        optimizer = keras.optimizers.Adam(3e-3)
        optimizer.build(model.trainable_variables)
        state = tf.train.Checkpoint(model=model, optimizer=optimizer, epoch=tf.Variable(0))
    start = get_checkpoint()
    if start is not None:
        state.read(f"{start.path}/state").assert_consumed()

    def step(images, shown):
        with tf.GradientTape() as tape:
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(
                tf.cast(shown, tf.int64), model(images)
            )
            loss = tf.reduce_mean(each) / strategy.num_replicas_in_sync
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function
    def together(images, shown):
        losses = strategy.run(step, args=(images, shown))
        return strategy.reduce("SUM", losses, axis=None)

    shard = get_dataset_shard("train")
    for epoch in range(state.epoch.numpy(), EPOCHS):
        kill_a_worker(epoch)
        for images, shown in shard.to_tf(
            feature_columns="image", label_columns="shown", batch_size=16
        ):
            loss = together(images, shown)
            shard.used()
        state.epoch.assign(epoch + 1)
        metrics = {"loss": float(loss), "workers": get_context().get_world_size()}
        with tempfile.TemporaryDirectory() as directory:
            state.write(str(Path(directory, "state")))
            report(metrics, checkpoint=Checkpoint.from_directory(directory))


def main():
    import tensorflow as tf

    (images, shown), (others, _) = digits()
    result = make_trainer(
        "tensorflow",
        train,
        datasets={"train": {"image": images, "shown": shown}},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=1)),
    ).fit()
    model = network()
    tf.train.Checkpoint(model=model).read(f"{result.checkpoint.path}/state").expect_partial()
    print_result(result, model.predict(others, verbose=0).argmax(1))


if __name__ == "__main__":
    main()
