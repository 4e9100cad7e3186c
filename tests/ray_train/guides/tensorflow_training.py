"""A loop of TensorFlow's own under its strategy, with a checkpoint an epoch."""

import json
import os
import tempfile

import ray.train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer


def train_func(config):
    import numpy as np
    import tensorflow as tf

    workers = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    batch_size = config["batch_size"] * len(workers)
    x = np.arange(64, dtype=np.float32) / 64
    rows = tf.data.Dataset.from_tensor_slices((x, 2 * x)).batch(batch_size)
    batches = strategy.experimental_distribute_dataset(rows)
    with strategy.scope():
        weight = tf.Variable(0.0)

    def step(inputs, targets):
        with tf.GradientTape() as tape:
            errors = weight * inputs - targets
            loss = tf.reduce_sum(errors**2) / batch_size
        gradient = tape.gradient(loss, weight)
        gradient = tf.distribute.get_replica_context().all_reduce("SUM", gradient)
        weight.assign_sub(config["lr"] * gradient, read_value=False)
        return loss

    train_step = tf.function(lambda *batch: strategy.run(step, args=batch))
    for epoch in range(config["epochs"]):
        for batch in batches:
            losses = train_step(*batch)
            loss = strategy.reduce("SUM", losses, axis=None)
        with tempfile.TemporaryDirectory() as directory:
            np.save(os.path.join(directory, "weight.npy"), weight.numpy())
            metrics = {"epoch": epoch, "loss": float(loss)}
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(directory))


trainer = TensorflowTrainer(
    train_func,
    train_loop_config={"lr": 0.1, "epochs": 3, "batch_size": 8},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="tensorflow", storage_path=os.path.join(os.getcwd(), "storage")),
)
print("RESULT", json.dumps(trainer.fit().metrics))
