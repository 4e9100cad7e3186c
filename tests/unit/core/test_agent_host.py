"""Agents of one node come and go, whoever of them started what they share."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import psutil
import pytest

from polytrain.checkpoint.store import CheckpointStore
from polytrain.common.placement import NodeAddress
from polytrain.storage.location import Location
from polytrain.workers.agent import AgentSpec
from polytrain.workers.agent_host import AgentHost, Mail, Ready
from polytrain.workers.processes.client import ZygoteSpec

HERE = NodeAddress(node_id="node", host="127.0.0.1")


def test_an_agent_ends_while_others_use_the_zygote_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nobody gets its resources until the run ends."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "marker").touch()
    spec = AgentSpec(
        token=secrets.token_hex(8),
        zygote=ZygoteSpec(name=secrets.token_hex(8), environment={}, modules=(), path=()),
        environment={},
        directory=str(tmp_path),
        prefix="",
        store=CheckpointStore(location=Location.of(tmp_path)),
        marker="marker",
        hang_timeout_s=None,
        straggler_window_s=None,
        merges_files=False,
        passes_all_reports=False,
        leave_timeout_s=60.0,
        kill_timeout_s=60.0,
    )

    async def run() -> None:
        others = set(psutil.Process().children())
        arrived: asyncio.Queue[tuple[int, Mail]] = asyncio.Queue()
        host = AgentHost(spec, HERE, {}, tell=lambda *mail: arrived.put_nowait(mail))
        for number in (0, 1):
            host.start(number)
            assert isinstance((await arrived.get())[1][0], Ready)
        [zygote] = set(psutil.Process().children()) - others
        await host.end(0)
        assert zygote.is_running()
        await host.end_all()
        # It has been waited for.
        assert not zygote.is_running()

    asyncio.run(asyncio.wait_for(run(), 30))
