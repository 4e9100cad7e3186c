"""Keras under TensorFlow's strategy, with the report callback."""

import json
import os

# Ray Train trains models of tf_keras. This must be set before TensorFlow is imported.
os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
from ray.train import RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer
from ray.train.tensorflow.keras import ReportCheckpointCallback


def train_func(config):
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    x = np.arange(64, dtype=np.float32)[:, None] / 64
    data = tf.data.Dataset.from_tensor_slices((x, 2 * x)).batch(8)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    with strategy.scope():
        dense = tf.keras.layers.Dense(1, kernel_initializer="zeros")
        model = tf.keras.Sequential([tf.keras.Input((1,)), dense])
        model.compile(optimizer=tf.keras.optimizers.SGD(config["lr"]), loss="mse")
    model.fit(
        data.with_options(options),
        epochs=config["epochs"],
        verbose=0,
        callbacks=[ReportCheckpointCallback()],
    )


trainer = TensorflowTrainer(
    train_func,
    train_loop_config={"lr": 0.1, "epochs": 2},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="keras", storage_path=os.path.join(os.getcwd(), "storage")),
)
result = trainer.fit()
files = sorted(os.listdir(result.checkpoint.path))
print("RESULT", json.dumps({**result.metrics, "saved": "model.keras" in files}))
