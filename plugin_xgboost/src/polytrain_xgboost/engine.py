"""The trainer half: tracker and communicator of the generation, and the boosting loop."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xgboost
from xgboost import collective
from xgboost.tracker import RabitTracker

from polytrain_plugins import Engine, Member, Offer, Session, Shard, World
from polytrain_xgboost.backend import XGBoost
from polytrain_xgboost.collecting import Ranks
from polytrain_xgboost.intercept import estimated_intercept, marked_as_estimated
from polytrain_xgboost.matrices import TrainingData, prediction_matrix, training_data
from polytrain_xgboost.outside import outside_the_collective
from polytrain_xgboost.rounds import (
    draws_columns,
    evaluated,
    forget_column_draws,
    has_stopped,
    is_exhausted,
    rows_drawn,
)

MODEL_FILE = "model.ubj"


class XGBoostEngine(Engine[xgboost.Booster]):
    """One rank of a collective that rank 0's tracker brings together."""

    def __init__(self, options: XGBoost) -> None:
        self._options = options
        self._tracker: RabitTracker | None = None

    @contextmanager
    def offering(self, me: Member) -> Iterator[Offer]:
        if me.rank != 0:
            yield Offer()
            return
        # It listens from here on, on a port that the system has chosen. By task id: ranks are ours.
        tracker = RabitTracker(n_workers=me.world_size, host_ip=me.host, sortby="task")
        tracker.start()
        self._tracker = tracker
        yield Offer(details=dict(tracker.worker_args()))

    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        # Ids are sorted as strings, hence the leading zeros.
        communicator = collective.CommunicatorContext(
            **world.leader.details, dmlc_task_id=f"{world.me.rank:08d}"
        )
        with ExitStack() as stack:
            # It prints its rank, however quiet it has been told to be.
            with redirect_stdout(io.StringIO()):
                stack.enter_context(communicator)
            yield
        if self._tracker is not None:
            # It has to serve those who leave later than its own rank.
            self._tracker.wait_for()
            self._tracker.free()
            self._tracker = None

    def sum_over_ranks(self, values: Sequence[int], world: World) -> list[int]:
        sums = collective.allreduce(np.array(values, dtype=np.int64), collective.Op.SUM)
        return [int(number) for number in sums]

    def train(self, shards: Mapping[str, Shard], session: Session) -> xgboost.Booster:
        options, me = self._options, session.world.me
        ranks = Ranks(me=me.rank, size=session.world.size)
        params = {"tree_method": "hist", "nthread": me.cpus, **options.booster_params}
        booster = None
        if session.checkpoint is not None:
            booster = self.load(session.checkpoint)
            if _is_finished(booster, options):
                return booster
        with outside_the_collective() as outside:
            data = training_data(
                {name: shard.to_arrow() for name, shard in shards.items()},
                options=options,
                params=params,
                ranks=ranks,
                outside=outside,
            )
            if booster is None and "base_score" not in params:
                params["base_score"] = estimated_intercept(
                    data.facts, params, ranks=ranks, outside=outside
                )
            patience = options.early_stopping_rounds
            matrices = [data.train, *data.evaluated.values()]
            booster = xgboost.Booster(params, matrices, model_file=booster)
            for round_ in range(booster.num_boosted_rounds(), options.num_boost_round):
                self._boost(booster, data, round_, params)
                metrics = evaluated(
                    booster, data, round_=round_, train=options.eval_train, outside=outside
                )
                # First, so that a checkpoint of this round holds what is noted here.
                stop = patience is not None and is_exhausted(
                    booster, metrics, round_=round_, patience=patience
                )
                session.report(step=round_ + 1, metrics=metrics, model=booster)
                if stop:
                    break
        return booster

    def save(self, model: xgboost.Booster, directory: Path) -> None:
        saved = bytes(model.save_raw())
        if "base_score" not in self._options.params:
            saved = marked_as_estimated(saved)
        (directory / MODEL_FILE).write_bytes(saved)

    def load(self, directory: Path) -> xgboost.Booster:
        return xgboost.Booster(model_file=directory / MODEL_FILE)

    def predict(
        self, model: xgboost.Booster, table: pa.Table, **options: Any
    ) -> np.ndarray[Any, Any]:
        best = model.attr("best_iteration")
        if best is not None:
            # As xgboost's own estimators do.
            options = {"iteration_range": (0, int(best) + 1), **options}
        matrix = prediction_matrix(table, model, base_margin=self._options.base_margin)
        return np.asarray(model.predict(matrix, **options))

    def _boost(
        self,
        booster: xgboost.Booster,
        data: TrainingData,
        round_: int,
        params: Mapping[str, Any],
    ) -> None:
        if draws_columns(params):
            forget_column_draws(booster, params["tree_method"])
        with rows_drawn(data, rate=self._options.row_rate, seed=self._options.seed, round_=round_):
            booster.update(data.train, round_)


def _is_finished(booster: xgboost.Booster, options: XGBoost) -> bool:
    if booster.num_boosted_rounds() >= options.num_boost_round:
        return True
    patience = options.early_stopping_rounds
    return patience is not None and has_stopped(booster, patience)
