"""The settings of an agent, as tests of agents without a run give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polytrain.checkpoint.store import CheckpointStore
from polytrain.events.output import OutputRoute
from polytrain.storage.location import Location
from polytrain.workers.agents.agent_spec import AgentSpec
from polytrain.workers.processes.zygote_connection import ZygoteSpec


def agent_spec(directory: Path, *, zygote: str = "zygote", **changed: Any) -> AgentSpec:
    """Return the settings of an agent whose run is in a directory, with its marker."""
    (directory / "marker").touch()
    settings: dict[str, Any] = {
        "token": "token",
        "zygote": ZygoteSpec(name=zygote, environment={}, modules=(), path=()),
        "directory": str(directory),
        "argv": (),
        "prefix": "",
        "store": CheckpointStore(location=Location.of(directory)),
        "marker": "marker",
        "hang_timeout_s": None,
        "passes_all_reports": False,
        "route": OutputRoute(),
        "straggler_window_s": None,
        "merges_files": False,
        "leave_timeout_s": 60.0,
        "kill_timeout_s": 60.0,
    }
    return AgentSpec(**{**settings, **changed})
