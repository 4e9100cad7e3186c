"""How long a run waits for agents that have their resources and are starting."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polytrain.policy.scaling import Starting, expected

agents = st.integers(0, 40)
seconds = st.floats(0, 1000)


@given(up=agents, late=agents, waited_s=seconds, limit_s=seconds)
def test_those_that_start_are_waited_for_and_never_beyond_the_limit(
    up: int, late: int, waited_s: float, limit_s: float
) -> None:
    starting = Starting(hosts=("10.77.0.3",) * late)
    found = expected(up=up, starting=starting, waited_s=waited_s, limit_s=limit_s)
    assert found.workers == (up + late if waited_s < limit_s else up)
    # Whoever waits, and whoever does no longer, can be told for which node.
    assert ("10.77.0.3" in found.reason) == (late > 0)


def test_what_is_awaited_is_said_with_its_nodes() -> None:
    starting = Starting(hosts=("10.77.0.3", "10.77.0.2", "10.77.0.3"))
    assert str(starting) == "Ray is starting processes on 10.77.0.2, 10.77.0.3 (reserved)"
    assert str(Starting(hosts=("a",), setup="'pip'")) == "Ray sets up 'pip'"
    many = Starting(hosts=tuple(f"10.0.0.{number}" for number in range(10, 30)))
    assert "10.0.0.10, " in many.nodes
    assert many.nodes.endswith(" and 12 more nodes")
