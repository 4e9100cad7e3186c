"""One Ray for all tests that train in this process."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import ray

from polytrain import RunConfig


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> None:
    """A local Ray with 4 CPUs, unless another module has left one."""
    if not ray.is_initialized():
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )


@pytest.fixture
def quiet(tmp_path: Path) -> RunConfig:
    """A run in a directory of the test's own, without a line of progress."""
    return RunConfig(storage_path=tmp_path, progress=False)
