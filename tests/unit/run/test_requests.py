"""Requests from other processes: who answers them, and when."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from polytrain.events.attempt import Stacks
from polytrain.run.deadlines import Deadline, Deadlines
from polytrain.run.health_monitor import StacksAnswers
from polytrain.run.requests import NoAnswerError, RemoteRequests, RequestKind, ask
from polytrain.storage.location import Location
from polytrain.workers.agents.calls import ReadStacks
from polytrain_plugins import Stopped


def requests_of(path: Path, token: int, stops: list[Stopped]) -> RemoteRequests:
    return RemoteRequests(
        Location.of(path).open(),
        token,
        stop=stops.append,
        stacks=lambda request: None,
        inline_thread=threading.get_ident(),
    )


def test_a_request_to_stop_reaches_the_driver(tmp_path: Path) -> None:
    stops: list[Stopped] = []
    storage = Location.of(tmp_path).open()
    with requests_of(tmp_path, 3, stops):
        ask(storage, 3, RequestKind.STOP, timeout_s=30, reason="enough")
    assert stops == [Stopped(by="command", reason="enough")]
    assert str(stops[0]) == "stopped by polytrain stop: enough"
    assert storage.list("requests") == {}


def test_a_request_to_an_earlier_driver_is_not_taken(tmp_path: Path) -> None:
    stops: list[Stopped] = []
    storage = Location.of(tmp_path).open()
    storage.write("requests/000002/0123456789abcdef", b'{"kind": "stop", "reason": ""}')
    with requests_of(tmp_path, 3, stops):
        ask(storage, 3, RequestKind.STOP, timeout_s=30)
    assert len(stops) == 1
    assert storage.list("requests") == {}


def test_nobody_answers_for_a_driver_that_is_gone(tmp_path: Path) -> None:
    storage = Location.of(tmp_path).open()
    with pytest.raises(NoAnswerError, match=r"has not answered for 0\.3 s"):
        ask(storage, 3, RequestKind.STOP, timeout_s=0.3)
    assert storage.list("requests") == {}


def test_an_inline_run_answers_with_the_stack_of_its_thread(tmp_path: Path) -> None:
    with requests_of(tmp_path, 3, []):
        answer = ask(Location.of(tmp_path).open(), 3, RequestKind.STACKS, timeout_s=30)
    assert "test_an_inline_run_answers" in answer["stacks"]["0"]


class Asked:
    """A run's driver that is asked for stacks."""

    def __init__(self) -> None:
        self.calls: list[ReadStacks] = []
        self.answers: dict[str, Mapping[int, str]] = {}
        self.deadlines = Deadlines()
        self.stacks = StacksAnswers(
            group=SimpleNamespace(call=self.calls.append),  # type: ignore[arg-type]
            remote_requests=SimpleNamespace(answer=self._answer),  # type: ignore[arg-type]
            background_tasks=SimpleNamespace(submit=lambda task: task()),  # type: ignore[arg-type]
            deadlines=self.deadlines,
        )

    def _answer(self, request: str, answer: Mapping[str, Mapping[int, str]]) -> None:
        self.answers[request] = answer["stacks"]


def test_stacks_answer_all_who_have_asked_meanwhile() -> None:
    asked = Asked()
    asked.stacks.wanted("a", attempt=1, world_size=2)
    asked.stacks.wanted("b", attempt=1, world_size=2)
    assert asked.calls == [ReadStacks(attempt=1, pausing=False)]
    asked.stacks.take(Stacks(attempt=1, rank=1, text="one"))
    asked.stacks.take(Stacks(attempt=0, rank=0, text="of an earlier attempt"))
    assert asked.answers == {}
    asked.stacks.take(Stacks(attempt=1, rank=0, text="zero"))
    assert asked.answers == {each: {0: "zero", 1: "one"} for each in "ab"}
    assert asked.deadlines.at(Deadline.STACKS) is None


def test_stacks_that_do_not_come_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    asked = Asked()
    asked.stacks.wanted("a", attempt=1, world_size=2)
    asked.stacks.take(Stacks(attempt=1, rank=1, text="one"))
    assert asked.deadlines.at(Deadline.STACKS) == 112
    asked.stacks.answer()
    assert asked.answers == {"a": {1: "one"}}


def test_a_new_attempt_is_asked_again() -> None:
    asked = Asked()
    asked.stacks.wanted("a", attempt=1, world_size=2)
    asked.stacks.wanted("b", attempt=2, world_size=1)
    assert [call.attempt for call in asked.calls] == [1, 2]
    asked.stacks.take(Stacks(attempt=2, rank=0, text="zero"))
    assert asked.answers == {"a": {0: "zero"}, "b": {0: "zero"}}
