"""Checks, before polytrain's collective calls, that all ranks make the same call.

Otherwise collectives would hang, or take each other's data. A rank that waits asks the missing
ranks. A thread of each answers if its rank can't make the call any more, because it is in another
collective, or has left the training function.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from polytrain import NotInWorkerError, get_context
from polytrain_torch.collectives.operation_queue import operations_begun
from polytrain_torch.private import operations_launched

_ASKS_EVERY_S = 1.0

_SHORTEST_NAP_S, _LONGEST_NAP_S = 5e-5, 0.05

_NEVER = timedelta(days=1000)

_LIBRARIES = {
    *("accelerate", "contextlib", "deepspeed", "keras", "lightning", "torch", "transformers"),
    *("polytrain", "polytrain_plugins", "polytrain_torch"),
}

_COLLECTIVES = "torch.distributed.distributed_c10d"

_BETWEEN_TWO = ("send", "recv", "isend", "irecv", "batch_isend_irecv")


def agree_on_call(call: str) -> None:
    """Wait until all ranks make the same call, given by its name. All ranks call this.

    Raises:
        RuntimeError: another rank makes another call, or can't make this one.
        TimeoutError: another rank doesn't make the call in time.
    """
    if _agreement is not None:
        _agreement.agree(call)


@contextmanager
def agreeing(
    store: dist.Store, connected: Callable[[], dist.Store], *, timeout_s: float
) -> Iterator[None]:
    """Compare the calls of all ranks in a block of code.

    Args:
        store: this thread's connection to the store of all ranks.
        connected: opens another connection.
        timeout_s: maximum seconds to wait for another rank.
    """
    global _agreement
    if dist.get_world_size() == 1:
        yield
        return
    answers = _Answers(connected)
    _agreement = _Agreement(store, timeout_s=timeout_s)
    try:
        yield
    finally:
        _agreement = None
        answers.stop(store)


class _Agreement:
    """Compares one rank's calls with other ranks' calls."""

    def __init__(self, store: dist.Store, *, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._rank = dist.get_rank()
        # Rank 0 compares all ranks' calls with its own; the others compare with rank 0's.
        self._others = [*range(1, dist.get_world_size())] if self._rank == 0 else [0]
        self._number = 0

    def agree(self, call: str) -> None:
        self._number += 1
        mine = f"{call} ({_place(sys._getframe())})"
        self._store.set(self._key(self._rank), f"{call}\n{mine}")
        # All ranks that had to read that key have since made the call after it.
        self._store.delete_key(self._key(self._rank, ago=2))
        self._wait(mine)
        labels = self._store.multi_get([self._key(rank) for rank in self._others])
        for rank, label in zip(self._others, labels, strict=True):
            other, _, theirs = label.decode().partition("\n")
            if other != call:
                raise _mismatch(self._rank, mine, rank, f"in {theirs}")

    def _wait(self, mine: str) -> None:
        began = asked = time.perf_counter()
        missing = self._others
        answers: dict[int, str] = {}
        while missing := [r for r in missing if not self._store.check([self._key(r)])]:
            now = time.perf_counter()
            if now - began > self._timeout_s:
                raise TimeoutError(
                    f"rank {self._rank} has waited {self._timeout_s:g} s for rank {missing[0]} in "
                    f"{mine}. All ranks must make this call. If a step takes longer than that, "
                    "raise timeout_s in the backend's options."
                )
            if now - asked < _ASKS_EVERY_S:
                time.sleep(min(max((now - began) / 4, _SHORTEST_NAP_S), _LONGEST_NAP_S))
                continue
            asked = now
            for rank in missing:
                answer = self._asked(rank)
                # Two equal answers: a rank in a slow collective may still make the call.
                if answer and answer == answers.get(rank):
                    raise _mismatch(self._rank, mine, rank, answer.partition("\n")[0])
                answers[rank] = answer

    def _asked(self, rank: int) -> str:
        """Return why a rank can't make the call; "" if it can, or doesn't answer in time."""
        number = self._store.add(f"asked {rank}", 1)
        done = f"{operations_launched()} {operations_begun()}"
        self._store.set(f"question {rank} {number}", done)
        answer, deadline = f"answer {rank} {number}", time.perf_counter() + _ASKS_EVERY_S
        while not self._store.check([answer]):
            if time.perf_counter() > deadline:
                return ""
            time.sleep(_LONGEST_NAP_S)
        return self._store.get(answer).decode()

    def _key(self, rank: int, *, ago: int = 0) -> str:
        return f"call {self._number - ago} {rank}"


_agreement: _Agreement | None = None


class _Answers:
    """A thread that answers other ranks' questions about this rank."""

    def __init__(self, connected: Callable[[], dist.Store]) -> None:
        self._connected = connected
        self._rank = dist.get_rank()
        self._trains = threading.get_ident()
        self._thread = threading.Thread(target=self._answer, name="call-agreement", daemon=True)
        self._thread.start()

    def stop(self, store: dist.Store) -> None:
        # If the rank that serves the store has gone, the thread ends by itself.
        with contextlib.suppress(RuntimeError):
            number = store.add(f"asked {self._rank}", 1)
            store.set(f"question {self._rank} {number}", "")
        self._thread.join(timeout=_ASKS_EVERY_S)

    def _answer(self) -> None:
        number = 0
        with contextlib.suppress(RuntimeError):
            # A connection of its own: `get` blocks it for the training function.
            store = self._connected()
            store.set_timeout(_NEVER)
            while True:
                number += 1
                question = f"question {self._rank} {number}"
                asked = store.get(question).decode()
                if not asked:
                    return
                launched, begun = map(int, asked.split())
                store.set(f"answer {self._rank} {number}", self._reason(launched, begun))

    def _reason(self, launched: int, begun: int) -> str:
        """Return why this rank can't make the call, and a progress value; "" if it can.

        It compares its operations with those that the asking rank has launched, and with the sums
        and broadcasts that that one has begun.
        """
        try:
            get_context()
        except NotInWorkerError:
            return "has ended its training function"
        frame = sys._current_frames().get(self._trains)
        if frame is None:
            return ""
        progress = f"{frame.f_lasti} {operations_launched()} {operations_begun()}"
        where = f"({_place(frame)})\n{id(frame)} {progress}"
        # Sums and broadcasts of a queue must have the same order on all ranks.
        if operations_begun() > begun:
            return f"averages gradients or sends weights {where}"
        collective = _collective(frame)
        if collective is not None and operations_launched() > launched:
            return f"is in torch.distributed.{collective} {where}"
        return ""


def _mismatch(rank: int, mine: str, other: int, theirs: str) -> RuntimeError:
    return RuntimeError(
        f"rank {rank} is in {mine}, and rank {other} {theirs}: all ranks must make the same calls, "
        "in the same order. Make this call on every rank, not only on some (if rank == 0: …)."
    )


def _place(frame: FrameType) -> str:
    """Return the file and line of the user's code that is running."""
    outer: FrameType | None = frame
    while outer is not None:
        if outer.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            frame = outer
            break
        outer = outer.f_back
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"


def _collective(frame: FrameType) -> str | None:
    """Return the name of the default group's collective that is running; None if none is."""
    outer: FrameType | None = frame
    while outer is not None:
        name = outer.f_code.co_name
        if (
            outer.f_globals.get("__name__") == _COLLECTIVES
            and not name.startswith("_")
            and name not in _BETWEEN_TWO
            and outer.f_locals.get("group") in (None, dist.group.WORLD)
        ):
            return name
        outer = outer.f_back
    return None
