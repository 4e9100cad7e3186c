"""LightGBM's network, of several machines or of two machines in one process."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import lightgbm
import numpy as np

from polytrain.extension import RankConnection
from polytrain_lightgbm.collective import Collective
from polytrain_plugins import HeldPort, held_port

QUIET = {"verbosity": -1}

Ours = TypeVar("Ours")


class Network:
    """Membership in a network, which belongs to the thread that enters it."""

    def __init__(self, machines: Sequence[str], port: HeldPort) -> None:
        """
        Args:
            machines: `host:port` of every machine, by rank; IPv4.
            port: this machine's port.
        """
        self._machines = machines
        self._port = port
        # LightGBM gives access to the network only through a booster.
        self._carrier = tiny_booster(QUIET, label=0.0)

    def enter(self) -> None:
        """Connect to all other machines. LightGBM prints a line; see `silent_stdout`."""
        # LightGBM can't bind a port that is still held.
        self._port.release()
        self._carrier.set_network(
            list(self._machines),
            local_listen_port=self._port.number,
            num_machines=len(self._machines),
        )

    def leave(self) -> None:
        """Disconnect."""
        self._carrier.free_network()


def by_two_machines(
    train: Callable[[Collective], Ours],
    partner: Callable[[Collective], object],
    *,
    ports: range | None = None,
) -> Ours:
    """Call both concurrently, each as a machine of one network; return the result of `train`.

    LightGBM on one machine counts rows in a leaf, and on several it estimates the number, so the
    models differ. Two threads of one process can be two machines.

    Args:
        train: called on this thread, as rank 0.
        partner: called on another thread, as rank 1. The collective tells it that `train` has
            failed, so it must not be inside a call of LightGBM when that may happen.
        ports: those at which the two may listen; None for any.
    """
    with ExitStack() as stack:
        held = [stack.enter_context(held_port(ports)) for _ in range(2)]
        machines = [f"127.0.0.1:{port.number}" for port in held]
        ours, theirs = (Network(machines, port) for port in held)
        thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="second-machine"))
        here, there = map(stack.enter_context, socket.socketpair())

        def its_part() -> None:
            with there:
                partner(Collective([RankConnection(there)], rank=1))

        with silent_stdout():
            entered = thread.submit(theirs.enter)
            ours.enter()
            entered.result()
        stack.callback(ours.leave)
        stack.callback(thread.submit, theirs.leave)
        stack.enter_context(here)
        done = thread.submit(its_part)
        try:
            trained = train(Collective([RankConnection(here)], rank=0))
        except ConnectionError:
            # The partner's own error is the cause.
            done.result()
            raise
        done.result()
        return trained


def by_itself(call: Callable[..., Ours], /, *args: Any) -> Ours:
    """Make a call on a thread that is in no network, and return its result."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call, *args).result()


@contextmanager
def silent_stdout() -> Iterator[None]:
    """Silence stdout: LightGBM's network prints that it listens, at any verbosity."""
    kept = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def tiny_booster(params: Mapping[str, Any], *, label: float) -> lightgbm.Booster:
    """Return a booster over four rows with the same label, for calls that need a booster."""
    data = lightgbm.Dataset(
        np.arange(4.0).reshape(4, 1),
        label=np.full(4, label),
        params={**params, "min_data_in_bin": 1, "min_data_in_leaf": 1},
    )
    return lightgbm.Booster({**params, "num_leaves": 2, "learning_rate": 1e-9}, data)
