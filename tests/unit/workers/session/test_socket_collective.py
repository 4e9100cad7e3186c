"""The core's collective: right sums, agreement on the call, and errors where a rank has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polytrain.extension import SocketCollective
from polytrain.policy.connections import Origins, is_broken_connection
from polytrain.policy.placement import NodeAddress, members
from polytrain.workers.session.socket_collective import MODULES
from polytrain_plugins import Offer, World

Work = Callable[[SocketCollective, int], Any]

PART = 1 << 20


def on_ranks(count: int, work: Work) -> list[Any]:
    """What each rank's work returns, or the exception that it raises. Each rank has a thread."""
    everybody = members([NodeAddress(node_id="n", host="127.0.0.1")] * count, cpus=1, gpus=0)
    ranks = [SocketCollective() for _ in range(count)]
    with ExitStack() as stack, ThreadPoolExecutor(count) as threads:
        offers: tuple[Offer, ...] = tuple(
            stack.enter_context(rank.offering(me))
            for rank, me in zip(ranks, everybody, strict=True)
        )

        def life(number: int) -> Any:
            world = World(attempt=0, me=everybody[number], members=everybody, offers=offers)
            try:
                with ranks[number].joined(world):
                    return work(ranks[number], number)
            except Exception as error:
                return error

        return [life.result(timeout=60) for life in [threads.submit(life, n) for n in range(count)]]


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_every_rank_gets_the_sum(count: int) -> None:
    sums = on_ranks(count, lambda ranks, rank: ranks.sum(np.array([rank, 2 * rank, 7])))
    all_ = count * (count - 1) // 2
    assert [each.tolist() for each in sums] == [[all_, 2 * all_, 7 * count]] * count


@pytest.mark.parametrize("size", [0, 1, PART // 8 - 1, PART // 8, PART // 8 + 1, 3 * PART // 8 + 5])
def test_arrays_of_any_size_are_added(size: int) -> None:
    values = np.random.default_rng(3).normal(size=(3, size))
    sums = on_ranks(3, lambda ranks, rank: ranks.sum(values[rank]))
    for each in sums:
        np.testing.assert_array_equal(each, values[0] + values[1] + values[2])


@pytest.mark.parametrize("dtype", ["int8", "uint32", "int64", "float16", ">f4", "complex64"])
@pytest.mark.parametrize("shape", [(), (2, 3), (3, 0)])
def test_type_and_shape_stay_as_they_are(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype)
    for each in on_ranks(2, lambda ranks, rank: ranks.sum(array)):
        assert (each.dtype, each.shape) == (array.dtype, array.shape)
        assert (each == 2).all()


def test_strided_arrays_are_added_in_the_order_of_their_values() -> None:
    array = np.arange(6.0).reshape(2, 3).T[::-1]
    for each in on_ranks(2, lambda ranks, rank: ranks.sum(array)):
        np.testing.assert_array_equal(each, 2 * array)


def test_the_order_of_addition_is_that_of_the_ranks() -> None:
    """Rank 2 is first to send, and the rounding is still that of 0, 1, 2."""
    values = [1e16, 1.0, -1e16]
    rank_2_was_there = threading.Event()

    def late(ranks: SocketCollective, rank: int) -> float:
        if rank == 1:
            assert rank_2_was_there.wait(30)
        if rank == 2:
            rank_2_was_there.set()
        return float(ranks.sum(np.array(values[rank])))

    assert on_ranks(3, late) == [(1e16 + 1.0) - 1e16] * 3


@pytest.mark.parametrize("count", [1, 4])
def test_rank_0s_bytes_reach_every_rank(count: int) -> None:
    data = os.urandom(3 * PART)
    sent = lambda ranks, rank: ranks.broadcast(data if rank == 0 else b"")  # noqa: E731
    assert on_ranks(count, sent) == [data] * count


@pytest.mark.parametrize("count", [1, 4])
def test_every_ranks_bytes_reach_every_rank(count: int) -> None:
    pieces = [b"", b"one", os.urandom(2 * PART + 1), b"\0"][:count]
    assert on_ranks(count, lambda ranks, rank: ranks.all_gather(pieces[rank])) == [pieces] * count


def test_nobody_passes_a_barrier_before_all_are_there() -> None:
    arrived: list[int] = []

    def work(ranks: SocketCollective, rank: int) -> int:
        arrived.append(rank)
        ranks.barrier()
        return len(arrived)

    assert on_ranks(5, work) == [5] * 5


def test_calls_follow_one_another() -> None:
    def work(ranks: SocketCollective, rank: int) -> list[int]:
        return [int(ranks.sum(np.array(n))) + len(ranks.all_gather(b"x")) for n in range(50)]

    assert on_ranks(3, work) == [[3 * n + 3 for n in range(50)]] * 3


def test_text_can_not_be_added() -> None:
    for error in on_ranks(2, lambda ranks, rank: ranks.sum(np.array(["a"]))):
        assert isinstance(error, TypeError)
        assert "<U1 can't be added up. Convert it to numbers first" in str(error)


CALLS: dict[str, Callable[[SocketCollective], Any]] = {
    "sum of int64, shape (2,)": lambda ranks: ranks.sum(np.array([1, 2])),
    "sum of float64, shape (2,)": lambda ranks: ranks.sum(np.array([1.0, 2.0])),
    "sum of int64, shape (3,)": lambda ranks: ranks.sum(np.array([1, 2, 3])),
    "broadcast": lambda ranks: ranks.broadcast(b"x"),
    "all_gather": lambda ranks: ranks.all_gather(bytes(3 * PART)),
    "barrier": lambda ranks: ranks.barrier(),
}


@pytest.mark.parametrize("other", list(CALLS)[1:])
def test_another_call_is_named_on_every_rank(other: str) -> None:
    common = next(iter(CALLS))
    errors = on_ranks(4, lambda ranks, rank: CALLS[other if rank == 2 else common](ranks))
    for error in errors:
        assert type(error) is RuntimeError
        assert f"rank 0 calls {common}, and rank 2 calls {other}: all ranks must" in str(error)


@pytest.mark.parametrize("gone", [0, 1, 3])
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_has_ended_is_an_error_on_all_others(gone: int, call: str) -> None:
    errors = on_ranks(4, lambda ranks, rank: None if rank == gone else CALLS[call](ranks))
    for rank, error in enumerate(errors):
        if rank != gone:
            assert isinstance(error, ConnectionError)
            assert f"rank {gone} has left the collective" in str(error)
            # So the driver takes it for a consequence, and looks for the cause at another rank.
            assert is_broken_connection(
                error, Origins(engine=frozenset({"mine", *MODULES}), frameworks=frozenset())
            )


def test_a_rank_that_ends_while_another_is_busy_is_noticed_at_once() -> None:
    """Rank 1 computes until the others have their errors."""
    others_know = threading.Event()

    def work(ranks: SocketCollective, rank: int) -> None:
        if rank == 1:
            assert others_know.wait(30), "rank 0 has waited for rank 1 first"
        elif rank != 2:
            try:
                ranks.barrier()
            finally:
                if rank == 0:
                    others_know.set()

    zero, one, two, three = on_ranks(4, work)
    assert one is None
    assert two is None
    for error in (zero, three):
        assert "rank 2 has left the collective" in str(error)


def test_after_an_error_the_reason_is_repeated() -> None:
    def work(ranks: SocketCollective, rank: int) -> str:
        for attempt in ("first", "second"):
            try:
                CALLS["barrier" if rank else "broadcast"](ranks)
            except (RuntimeError, ConnectionError) as error:
                if attempt == "second":
                    return f"{type(error).__name__}: {error}"
        return "no error"

    for text in on_ranks(2, work):
        assert text.startswith("ConnectionError: the collective is closed: an earlier call has")
        assert "rank 0 calls broadcast, and rank 1 calls barrier" in text


def test_it_is_used_between_joining_and_leaving_only() -> None:
    collective = SocketCollective()
    with pytest.raises(ConnectionError, match=r"used outside of `with collective\.joined\(world\)"):
        collective.barrier()


def test_a_killed_process_is_an_error_for_the_others(tmp_path: Path) -> None:
    """Real processes, and a SIGKILL while 64 MiB are on their way."""
    script = tmp_path / "rank.py"
    script.write_text(_PROCESS)
    command = [sys.executable, script]
    ranks = [
        subprocess.Popen([*command, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for n in range(3)
    ]
    try:
        assert all(rank.stdin and rank.stdout for rank in ranks)
        offer = ranks[0].stdout.readline()
        for rank in ranks[1:]:
            rank.stdin.write(offer)
            rank.stdin.flush()
        # It has added some parts.
        assert ranks[2].stdout.readline() == b"summed\n"
        ranks[2].send_signal(signal.SIGKILL)
        ends = [rank.communicate(timeout=60)[0].decode() for rank in ranks[:2]]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    for end in ends:
        assert end.splitlines()[-1].startswith("ConnectionError: rank "), end


_PROCESS = """
import json
import sys
import numpy as np
from polytrain.extension import SocketCollective
from polytrain.policy.placement import NodeAddress, members
from polytrain_plugins import Offer, World

rank = int(sys.argv[1])
everybody = members([NodeAddress(node_id="n", host="127.0.0.1")] * 3, cpus=1, gpus=0)
ranks = SocketCollective()
with ranks.offering(everybody[rank]) as offer:
    if rank == 0:
        print(json.dumps({"host": offer.host, "details": offer.details}), flush=True)
    else:
        offer = Offer(**json.loads(sys.stdin.readline()))
    world = World(
        attempt=0, me=everybody[rank], members=everybody, offers=(offer, Offer(), Offer())
    )
    try:
        with ranks.joined(world):
            while True:
                ranks.sum(np.ones(1 << 23))
                print("summed", flush=True)
    except ConnectionError as error:
        print(f"ConnectionError: {error}", flush=True)
"""
