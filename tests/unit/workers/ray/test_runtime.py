"""Whose Ray it is, where several runs of one process use it. Nothing is started here."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from polytrain_plugins import InvalidJobError

ray = pytest.importorskip("ray")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of Ray, which does it."""
    made: list[str] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: made[-1:] == ["init"])
    monkeypatch.setattr(ray, "init", lambda *_, **__: made.append("init"))
    monkeypatch.setattr(ray, "shutdown", lambda: made.append("shutdown"))
    return made


def test_ray_is_there_until_the_last_run_has_ended(calls: list[str]) -> None:
    """The run that has started it may end before one that found it there."""
    from polytrain.workers.ray.connection import running_ray

    first, second = ExitStack(), ExitStack()
    first.enter_context(running_ray())
    second.enter_context(running_ray())
    first.close()
    assert calls == ["init"]
    second.close()
    assert calls == ["init", "shutdown"]
    with running_ray():
        assert calls == ["init", "shutdown", "init"]
    assert calls == ["init", "shutdown"] * 2


def test_the_users_own_ray_stays(calls: list[str]) -> None:
    from polytrain.workers.ray.connection import running_ray

    ray.init()
    with running_ray(), running_ray():
        pass
    assert calls == ["init"]


MISMATCH = """Version mismatch: The cluster was started with:
    Ray: 2.60.0
    Python: 3.11.7
This process on node 192.0.2.2 was started with:
    Ray: 2.60.0
    Python: 3.13.0
"""


def test_a_cluster_with_a_different_python_is_reported_with_the_way_out(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from polytrain.workers.ray.connection import running_ray

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(MISMATCH)

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(InvalidJobError) as caught, running_ray():
        pass
    [problem] = caught.value.problems
    assert problem.field == "RAY_ADDRESS"
    assert "Python: 3.11.7 This process" in problem.what
    assert "set RAY_ADDRESS=local" in problem.remedy
    assert calls == ["shutdown"]
