"""Agents of one node come and go, whoever of them started what they share."""

from __future__ import annotations

import asyncio
import secrets
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from tests.unit.workers.agents.agent_specs import agent_spec

from polytrain.policy.placement import NodeAddress
from polytrain.workers.agents.agent_host import AgentHost, AgentReady, Mail

HERE = NodeAddress(node_id="node", host="127.0.0.1")


def test_an_agent_ends_while_others_use_the_zygote_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nobody gets its resources until the run ends."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    spec = agent_spec(tmp_path, token=secrets.token_hex(8), zygote=secrets.token_hex(8))

    anything: Any = None

    async def run() -> None:
        others = set(psutil.Process().children())
        arrived: asyncio.Queue[tuple[int, Mail]] = asyncio.Queue()
        host = AgentHost(
            spec, b"job", HERE, {}, tell=lambda *mail: arrived.put_nowait(mail), is_driver=True
        )
        for number in (0, 1):
            host.start([number])
            assert isinstance((await arrived.get())[1], AgentReady)
        [zygote] = set(psutil.Process().children()) - others
        await host.end(0)
        assert zygote.is_running()
        # What agents on other hosts still send it is no reason to say anything.
        with pytest.raises(ConnectionError):
            await host.keep(0, anything)
        with monkeypatch.context() as limited:
            refused = RuntimeError("can't start new thread")
            limited.setattr(threading.Thread, "start", Mock(side_effect=refused))
            await host.end_all()
        # It has been waited for.
        assert not zygote.is_running()

    asyncio.run(asyncio.wait_for(run(), 30))
