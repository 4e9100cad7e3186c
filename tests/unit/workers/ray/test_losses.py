"""Which loss an error of Ray's means: an agent's alone, or its node's."""

from __future__ import annotations

import pytest

from polytrain.errors import FailureKind
from polytrain.policy.placement import NodeAddress

pytest.importorskip("ray")

from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    RayActorError,
    RayError,
)

from polytrain.workers.ray import losses

PLACE = NodeAddress(node_id="c", host="10.0.0.3")


@pytest.fixture(params=[True, False])
def node_is_up(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the node's raylet answers. Ray hasn't noticed any loss."""
    monkeypatch.setattr(losses, "death_of_node", lambda _: None)
    monkeypatch.setattr(losses, "is_reachable", lambda _: request.param)
    return bool(request.param)


@pytest.mark.parametrize("error", [ActorDiedError(), ActorUnavailableError("no reply", b"a" * 16)])
def test_an_actor_whose_raylet_is_gone_too_is_lost_with_its_node(
    error: RayError, node_is_up: bool
) -> None:
    """Whether Ray calls the actor dead or out of reach: what else is there is lost as well."""
    kind, reason = losses.why_gone(error, PLACE, {})
    assert kind is (FailureKind.AGENT_LOST if node_is_up else FailureKind.NODE_LOST)
    assert ("10.0.0.3 is gone" in reason) != node_is_up


def test_an_actor_that_died_while_it_started_leads_to_rays_logs() -> None:
    """No other place has its output: it hasn't arrived."""
    kind, reason = losses.why_gone(ActorDiedError(), None, {})
    assert kind is FailureKind.AGENT_LOST
    assert reason.startswith("its agent died while it started (")
    assert reason.endswith("/tmp/ray/session_latest/logs")


RAISED = """The actor died because of an error raised in its creation task, ray::RayHost.__init__()
RuntimeError: The actor with name RayHost failed to import on the worker. This may be because
needed library dependencies are not installed in the worker environment:

ray::RayHost.__init__() (pid=17175, ip=192.0.2.2)
                  ^^^^^^^^^^^^^^^^^^^^^^^^^^^
ModuleNotFoundError: No module named 'polytrain'
"""


def test_what_an_agent_has_raised_while_it_started_is_named() -> None:
    _, reason = losses.why_gone(RayActorError(error_msg=RAISED), None, {})
    which = "its agent died while it started (ModuleNotFoundError: No module named 'polytrain'). "
    assert reason.startswith(which)
