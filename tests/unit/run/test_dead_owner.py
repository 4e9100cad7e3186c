"""A run whose driver has died is free at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from polytrain.errors import RunOwnedError
from polytrain.run.lease import leased
from polytrain.storage.local import LocalStorage


def test_a_dead_driver_owns_nothing_even_if_nobody_has_asked_for_its_exit_code(
    tmp_path: Path,
) -> None:
    storage = LocalStorage(tmp_path, retry_s=0)
    held, holds = os.pipe()
    owner = os.fork()
    if owner == 0:
        with leased(storage, storage):
            os.write(holds, b".")
            signal.pause()
    try:
        os.read(held, 1)
        with pytest.raises(RunOwnedError, match=f"process {owner} "), leased(storage, storage):
            pass
    finally:
        os.kill(owner, signal.SIGKILL)
        os.waitid(os.P_PID, owner, os.WEXITED | os.WNOWAIT)
    try:
        with leased(storage, storage) as lease:
            assert lease.token == 2
    finally:
        os.waitpid(owner, 0)
        os.close(held)
        os.close(holds)
