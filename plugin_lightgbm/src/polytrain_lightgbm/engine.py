"""The trainer half: LightGBM's network over all ranks' addresses, and the boosting loop."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np

from polytrain.data.groups import group_sizes
from polytrain_lightgbm.backend import LightGBM, parallel_params
from polytrain_lightgbm.rounds import AfterRound, History
from polytrain_lightgbm.star import Star, star
from polytrain_plugins import Engine, HeldPort, Member, Offer, Session, Shard, World, held_port

MODEL_FILE = "model.txt"
HISTORY_FILE = "history.json"

_QUIET = {"verbosity": -1}

_HALF = 1 << 20

_THREADS = ("num_threads", "num_thread", "nthreads", "nthread", "n_jobs")
_VERBOSITY = ("verbosity", "verbose")


class LightGBMEngine(Engine[lightgbm.Booster]):
    """One rank of LightGBM's network."""

    def __init__(self, options: LightGBM) -> None:
        self._options = options
        self._port: HeldPort | None = None
        self._listener: socket.socket | None = None
        self._star: Star | None = None
        self._history = History()

    @contextmanager
    def offering(self, me: Member) -> Iterator[Offer]:
        with ExitStack() as stack:
            self._port = stack.enter_context(held_port())
            details = {}
            if me.rank == 0:
                self._listener = stack.enter_context(socket.create_server(("", 0)))
                details["star_port"] = self._listener.getsockname()[1]
            yield Offer(host=me.host, port=self._port.number, details=details)

    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        if world.size == 1:
            yield
            return
        assert self._port is not None
        machines = [f"{socket.gethostbyname(o.host or '')}:{o.port}" for o in world.offers]
        # The network belongs to the process, but only a booster gives access to it.
        carrier = _tiny_booster(_QUIET, label=0.0)
        with star(world, self._listener) as self._star:
            # LightGBM can't bind a port that is still held.
            self._port.release()
            with _silent_stdout():
                carrier.set_network(
                    machines, local_listen_port=self._port.number, num_machines=world.size
                )
            yield
            carrier.free_network()
        self._star = None

    def sum_over_ranks(self, values: Sequence[int], world: World) -> list[int]:
        # How many ranks there are is not taken for granted: it is what the core wants to know.
        only_first = _mean_over_ranks(float(world.me.rank == 0), world)
        ranks = round(1 / only_first) if only_first > 0 else 0
        return [_sum_over_ranks(value, ranks, world) for value in values]

    def train(self, shards: Mapping[str, Shard], session: Session) -> lightgbm.Booster:
        options = self._options
        initial = None
        if session.checkpoint is not None:
            initial = self.load(session.checkpoint)
            self._history = History.from_json((session.checkpoint / HISTORY_FILE).read_text())
        done = len(self._history.rounds)
        if initial is not None and (
            done >= options.num_boost_round or self._history.best_iteration is not None
        ):
            return initial
        params = {
            **_defaults(options.params, cpus=session.world.me.cpus),
            **options.params,
            **parallel_params(session.world.size),
        }
        train = self._dataset(shards["train"], params)
        others = {name: shard for name, shard in shards.items() if name != "train"}
        after_round = AfterRound(
            session=session,
            history=self._history,
            total_rounds=options.num_boost_round,
            patience=options.early_stopping_rounds,
            star=self._star,
            train_weight=self._total_weight(shards["train"]),
        )
        return lightgbm.train(
            params,
            train,
            num_boost_round=options.num_boost_round - done,
            valid_sets=[train, *(self._dataset(s, params, train) for s in others.values())],
            valid_names=["train", *others],
            init_model=initial,
            callbacks=[after_round],
        )

    def save(self, model: lightgbm.Booster, directory: Path) -> None:
        # All trees: a restart goes on from the last, not from the best.
        text = model.model_to_string(num_iteration=-1)
        # LightGBM counts from the last restart: the same training would give another file.
        told = f"[num_iterations: {self._options.num_boost_round}]"
        text = re.sub(r"^\[num_iterations: \d+\]$", told, text, flags=re.MULTILINE)
        (directory / MODEL_FILE).write_text(text)
        (directory / HISTORY_FILE).write_text(self._history.to_json())

    def load(self, directory: Path) -> lightgbm.Booster:
        booster = lightgbm.Booster(model_file=directory / MODEL_FILE)
        history = directory / HISTORY_FILE
        if history.exists():
            best = History.from_json(history.read_text()).best_iteration
            booster.best_iteration = best if best is not None else 0
        return booster

    def _dataset(
        self, shard: Shard, params: Mapping[str, Any], reference: lightgbm.Dataset | None = None
    ) -> lightgbm.Dataset:
        table, options = shard.to_arrow(), self._options
        others = (options.label, options.weight, options.group)
        names = [name for name in table.column_names if name not in others]
        features = np.column_stack([table.column(name).to_numpy() for name in names])
        return lightgbm.Dataset(
            features,
            label=table.column(options.label).to_numpy(),
            weight=table.column(options.weight).to_numpy() if options.weight else None,
            group=group_sizes(table.column(options.group)) if options.group else None,
            feature_name=names,
            reference=reference,
            params=dict(params),
        )

    def _total_weight(self, shard: Shard) -> float:
        if self._options.weight is None:
            return float(len(shard))
        return float(shard.to_arrow().column(self._options.weight).to_numpy().sum())


def _sum_over_ranks(value: int, ranks: int, world: World) -> int:
    # In two halves: labels have 24 bits.
    high, low = divmod(value, _HALF)
    sums = [round(_mean_over_ranks(float(half), world) * ranks) for half in (high, low)]
    return sums[0] * _HALF + sums[1]


def _mean_over_ranks(value: float, world: World) -> float:
    """The mean of the ranks' numbers.

    LightGBM offers no collective operation to call; but where nothing can be learned, the first
    score of a regression is the mean of all ranks' labels.
    """
    params = {**_QUIET, **parallel_params(world.size), "objective": "regression"}
    booster = _tiny_booster(params, label=value)
    booster.update()
    return float(np.mean(booster.predict(np.zeros((1, 1)))))


def _defaults(params: Mapping[str, Any], *, cpus: int) -> dict[str, Any]:
    """What holds unless the user says otherwise, by whichever of LightGBM's names."""
    threads = {} if any(name in params for name in _THREADS) else {"num_threads": cpus}
    return threads if any(name in params for name in _VERBOSITY) else {**threads, **_QUIET}


@contextmanager
def _silent_stdout() -> Iterator[None]:
    """LightGBM's network says in C that it listens, however quiet it has been told to be."""
    kept = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _tiny_booster(params: Mapping[str, Any], *, label: float) -> lightgbm.Booster:
    """A booster over four rows of the same label: nothing to learn, and no time to lose."""
    data = lightgbm.Dataset(
        np.arange(4.0).reshape(4, 1),
        label=np.full(4, label),
        params={**params, "min_data_in_bin": 1, "min_data_in_leaf": 1},
    )
    return lightgbm.Booster({**params, "num_leaves": 2, "learning_rate": 1e-9}, data)
