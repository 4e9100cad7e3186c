"""A process that runs tests keeps more zygotes than a user's: its runs need many different ones.

Frameworks, and libraries on top of them, take turns. A zygote that had to go in between would
import its framework again, for seconds.

Runs with and without data, predictions and the kit's processes would each have a zygote of their
own for a framework. Here all zygotes have the modules of all of these, so that they share one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from polytrain.workers.processes import cache
from polytrain.workers.processes.cache import KeptZygote
from polytrain.workers.processes.zygote_connection import ZygoteSpec

AT_MOST = 6
"""Each has a framework in its memory, and as many as tests run at once keep theirs."""

FOR_S = 600.0

IN_ALL = (
    *("polytrain.workers.session.worker_process", "numpy", "pandas"),
    *("polytrain.data.shards.spec", "polytrain.prediction.predictor"),
    "polytrain.testing.local_rank",
    *("pytest", "polytrain.api.trainer", "polytrain.api.result"),
)
"""They take half a second to import, a framework up to four. The last three are imported by tests'
modules, and so by the workers that run functions of these: for longer than most of these run."""

UNIT = Path(__file__).parent / "unit"


@pytest.fixture(scope="module", autouse=True)
def many_zygotes_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep them, except for unit tests: those of the cache have it as users have."""
    with pytest.MonkeyPatch.context() as patch:
        if UNIT not in request.path.parents:
            patch.setattr(cache, "_KEPT_AT_MOST", AT_MOST)
            patch.setattr(cache, "_KEPT_S", FOR_S)
            for user in ("driver.agent_group", "processes.pool"):
                name = f"polytrain.workers.{user}.kept_or_new_zygote"
                patch.setattr(name, kept_or_new_zygote)
        yield


def kept_or_new_zygote(spec: ZygoteSpec, node_id: str) -> KeptZygote:
    """Return a kept zygote, or start one, that has at least the modules that are asked for."""
    others = (name for name in spec.modules if name not in IN_ALL)
    return cache.kept_or_new_zygote(replace(spec, modules=(*IN_ALL, *others)), node_id)
