"""The engine: connects LightGBM's network over all ranks' addresses, and boosts."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pyarrow as pa

from polytrain.boosting.columns import Numbers
from polytrain.boosting.round_reports import RoundReports, history_in
from polytrain.extension import LeaderListener, leader_listener
from polytrain_lightgbm.backend import LightGBM
from polytrain_lightgbm.boosting import Boosting
from polytrain_lightgbm.collective import Collective, connected
from polytrain_lightgbm.datasets import halves, predicted
from polytrain_lightgbm.history import History, has_ended
from polytrain_lightgbm.kept_rounds import KeptRounds, can_keep
from polytrain_lightgbm.names import as_lightgbm_has_it
from polytrain_lightgbm.network import (
    QUIET,
    Network,
    by_two_machines,
    silent_stdout,
    tiny_booster,
)
from polytrain_lightgbm.parameters import own_name, parallel_params
from polytrain_plugins import Engine, HeldPort, Member, Offer, Session, Shard, World, held_port

MODEL_FILE = "model.txt"
HISTORY_FILE = "history.json"

_HALF = 1 << 20


class LightGBMEngine(Engine[lightgbm.Booster]):
    """One rank of LightGBM's network."""

    def __init__(self, options: LightGBM) -> None:
        self._options = options
        self._port: HeldPort | None = None
        self._listener: LeaderListener | None = None
        self._collective: Collective | None = None
        self._boosting: Boosting | None = None
        self._history = History()

    @contextmanager
    def offering(self, me: Member) -> Iterator[Offer]:
        if me.world_size == 1:
            yield Offer()
            return
        with ExitStack() as stack:
            self._port = stack.enter_context(held_port(me.ports))
            if me.rank == 0:
                self._listener = stack.enter_context(leader_listener(me.listen_host, me.ports))
            details = {} if self._listener is None else self._listener.details
            yield Offer(host=me.listen_host, port=self._port.number, details=details)

    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        if world.size == 1:
            yield
            return
        assert self._port is not None
        machines = [f"{socket.gethostbyname(o.host or '')}:{o.port}" for o in world.offers]
        network = Network(machines, self._port)
        with connected(world, self._listener) as self._collective:
            with silent_stdout():
                network.enter()
            yield
            network.leave()
        self._collective = None

    def sum_over_ranks(self, values: Sequence[int], world: World) -> list[int]:
        # Measure the number of ranks, since the core checks it.
        only_first = _mean_over_ranks(float(world.me.rank == 0), world)
        ranks = round(1 / only_first) if only_first > 0 else 0
        return [_sum_over_ranks(value, ranks, world) for value in values]

    def gather_over_ranks(self, piece: bytes, world: World, *, call: str) -> list[bytes]:
        # A sum over all ranks trains a tree, which is slower.
        assert self._collective is not None, "several ranks are connected"
        return self._collective.all_gather(piece)

    def train(self, shards: Mapping[str, Shard], session: Session) -> lightgbm.Booster:
        options, me = self._options, session.world.me
        model = self._begun(session.checkpoint)
        self._history.continued_by(options.callbacks, options.params, own_name)
        done = len(self._history.rounds)
        if model is not None and (
            done >= options.num_boost_round or has_ended(self._history, options)
        ):
            return model
        self._history.best_iteration, self._history.is_over = None, False
        if options.needs_all_rounds:
            self._history = History(callbacks=self._history.callbacks)
            model = self._begun(None)
        # Rank 0 evaluates, and sends the metrics to the others.
        shards = {name: shard for name, shard in shards.items() if name == "train" or me.rank == 0}
        tables = {name: shard.to_arrow() for name, shard in shards.items()}

        state = KeptRounds(history=self._history, save=self._save) if can_keep(options) else None
        report = RoundReports(session, reported=done, state=state)

        if self._collective is not None:
            self._boosting = Boosting(
                options=options,
                threads=me.cpus,
                machines=me.world_size,
                collective=self._collective,
                calls_back=bool(options.callbacks),
                history=self._history,
            )
            return self._boosting.train(tables, model, report)

        ours, theirs = halves(tables["train"], options.group)
        threads = max(1, me.cpus // 2)

        calls_back = bool(options.callbacks)

        def machine(collective: Collective, options: LightGBM, history: History) -> Boosting:
            return Boosting(
                options=options,
                threads=threads,
                machines=2,
                collective=collective,
                in_step=lambda: collective.broadcast(collective.gather(None)),
                calls_back=calls_back,
                history=history,
            )

        def first(collective: Collective) -> lightgbm.Booster:
            self._boosting = machine(collective, options, self._history)
            return self._boosting.train({**tables, "train": ours}, model, report)

        def second(collective: Collective) -> None:
            its_history = copy.deepcopy(self._history)
            boosting = machine(collective, options.for_a_second_machine(), its_history)
            boosting.train({"train": theirs}, model, lambda *_: None)

        return by_two_machines(first, second, ports=me.ports)

    def save(self, model: lightgbm.Booster, directory: Path) -> None:
        history = self._history
        if history.best_iteration is None and model.best_iteration > 0:
            # An estimator's model, for workers that predict.
            history = replace(history, best_iteration=model.best_iteration)
        # Save all trees: a restart resumes from the last round, not from the best.
        self._save(model, -1, history, directory)

    def _save(
        self, model: lightgbm.Booster, iterations: int, history: History, directory: Path
    ) -> None:
        text = (
            model.model_to_string(num_iteration=iterations)
            if self._boosting is None
            else self._boosting.text_of(model, iterations)
        )
        (directory / MODEL_FILE).write_text(text)
        (directory / HISTORY_FILE).write_text(history.to_json())

    def load(self, directory: Path) -> lightgbm.Booster:
        booster = lightgbm.Booster(model_file=directory / MODEL_FILE)
        history = directory / HISTORY_FILE
        if history.exists():
            best = History.from_json(history.read_text()).best_iteration
            booster.best_iteration = best if best is not None else 0
        return booster

    def model_columns(self, directory: Path, columns: Sequence[str], **options: Any) -> list[str]:
        named = {as_lightgbm_has_it(name): name for name in columns}
        return [named.get(name, name) for name in self.load(directory).feature_name()]

    def predict(self, model: lightgbm.Booster, table: pa.Table, **options: Any) -> Numbers:
        return predicted(model, table, **options)

    def _begun(self, checkpoint: Path | None) -> lightgbm.Booster | None:
        """Return the model to resume from, or None, and load the history of its rounds."""
        given = self._options.init_model
        if checkpoint is not None:
            history = history_in(checkpoint, HISTORY_FILE, option=self._options.model_option)
            self._history = History.from_json(history)
            return self.load(checkpoint)
        if isinstance(given, str | os.PathLike):
            given = lightgbm.Booster(model_file=given)
        if given is not None:
            self._history.given_iterations = given.current_iteration()
        return given


def _sum_over_ranks(value: int, ranks: int, world: World) -> int:
    # Sum the high and the low half: float32 labels are exact up to 24 bits only.
    high, low = divmod(value, _HALF)
    sums = [round(_mean_over_ranks(float(half), world) * ranks) for half in (high, low)]
    return sums[0] * _HALF + sums[1]


def _mean_over_ranks(value: float, world: World) -> float:
    """Return the mean of the ranks' numbers.

    LightGBM has no collective operation to call. But a regression that can learn nothing predicts
    its initial score, the mean of all ranks' labels.
    """
    params = {**QUIET, **parallel_params(world.size), "objective": "regression"}
    booster = tiny_booster(params, label=value)
    booster.update()
    return float(np.mean(booster.predict(np.zeros((1, 1)))))
