"""Keep a run in object storage. Here the storage is a server on this machine, in memory.

pip install '.[xgboost-cpu]' 'moto[server]'
python examples/storage_s3.py
"""

from __future__ import annotations

import logging
import os
import urllib.request

import numpy as np
from moto.server import ThreadedMotoServer

import polytrain
from polytrain import CheckpointConfig, RunConfig, ScalingConfig, make_trainer


def main():
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    host, port = server.get_host_and_port()
    # For the real S3, the first two name your account, and the third isn't needed.
    os.environ["AWS_ACCESS_KEY_ID"] = os.environ["AWS_SECRET_ACCESS_KEY"] = "any"
    os.environ["AWS_ENDPOINT_URL"] = f"http://{host}:{port}"
    os.environ["AWS_REGION"] = "us-east-1"
    bucket = urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT")
    urllib.request.urlopen(bucket).close()

    x = np.random.default_rng(0).normal(size=(2000, 2))
    result = make_trainer(
        "xgboost",
        num_boost_round=20,
        label="y",
        datasets={"train": {"a": x[:, 0], "b": x[:, 1], "y": x.sum(axis=1)}},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="in_a_bucket",
            storage_path="s3://bucket/runs",
            checkpoint_config=CheckpointConfig(checkpoint_frequency=5, num_to_keep=2),
        ),
    ).fit()
    print(result.path)
    # From any process and machine, without the program that trained it:
    read = polytrain.load("s3://bucket/runs/in_a_bucket")
    print(f"{len(read.best_checkpoints)} checkpoints, {len(read.history)} rounds")
    print(f"a=1, b=1: {read.predict({'a': [1.0], 'b': [1.0]})[0]:.2f}")
    server.stop()


if __name__ == "__main__":
    main()
