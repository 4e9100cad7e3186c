"""What runs need around them, each in a process of its own: an S3 server, a Ray cluster.

As a script, this is that process: it writes where it can be reached, and ends with its input.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.object_storage import S3Server, s3_server


@contextmanager
def s3(bucket: str) -> Iterator[Mapping[str, str]]:
    """An S3 server with a bucket; what processes need in their environment to reach it."""
    with _service("s3", None) as url:
        server = S3Server(url=url)
        server.make_bucket(bucket)
        yield server.environment


@contextmanager
def cluster(environment: Mapping[str, str]) -> Iterator[str]:
    """A Ray cluster of this machine; its address."""
    with _service("cluster", environment) as address:
        yield address


@contextmanager
def _service(name: str, environment: Mapping[str, str] | None) -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.crash.services", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


def _serve_s3() -> None:
    with s3_server() as server:
        print(server.url, flush=True)
        sys.stdin.read()


def _serve_cluster() -> None:
    import ray

    ray.init(
        address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=40
    )
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    {"s3": _serve_s3, "cluster": _serve_cluster}[sys.argv[1]]()
