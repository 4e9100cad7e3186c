"""The trainer half: tracker and communicator of the generation, and the boosting loop."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import xgboost
from xgboost import collective
from xgboost.tracker import RabitTracker

from polytrain.data.groups import group_sizes
from polytrain_plugins import Engine, Member, Offer, Session, Shard, World
from polytrain_xgboost.backend import XGBoost

MODEL_FILE = "model.ubj"

# Metrics of which more is better, by the beginning of their names; all others are losses.
_MAXIMIZED = ("auc", "aucpr", "pre", "map", "ndcg")


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
        options = self._options
        threads = options.params.get("n_jobs", session.world.me.cpus)
        params = {"nthread": threads, **options.params}
        train = self._matrix(shards["train"], params)
        # "train" first: early stopping looks at the last.
        evaluated = [(train, "train")] + [
            (self._matrix(shard, params, train), name)
            for name, shard in shards.items()
            if name != "train"
        ]
        booster = self.load(session.checkpoint) if session.checkpoint is not None else None
        done = booster.num_boosted_rounds() if booster is not None else 0
        if booster is not None and (
            done >= options.num_boost_round or _has_stopped(booster, options)
        ):
            return booster
        return xgboost.train(
            params,
            train,
            num_boost_round=options.num_boost_round - done,
            evals=evaluated,
            callbacks=[_AfterRound(session, options.early_stopping_rounds)],
            xgb_model=booster,
            verbose_eval=False,
        )

    def save(self, model: xgboost.Booster, directory: Path) -> None:
        model.save_model(directory / MODEL_FILE)

    def load(self, directory: Path) -> xgboost.Booster:
        return xgboost.Booster(model_file=directory / MODEL_FILE)

    def _matrix(
        self, shard: Shard, params: Mapping[str, Any], ref: xgboost.DMatrix | None = None
    ) -> xgboost.QuantileDMatrix:
        table = shard.to_arrow()
        options = self._options
        others = (options.label, options.weight, options.qid)
        features = table.drop_columns([column for column in others if column is not None])
        return xgboost.QuantileDMatrix(
            features,
            label=table.column(options.label).to_numpy(),
            weight=table.column(options.weight).to_numpy() if options.weight else None,
            qid=_query_numbers(table.column(options.qid)) if options.qid else None,
            ref=ref,
            max_bin=params.get("max_bin", 256),
            nthread=params["nthread"],
        )


def _query_numbers(queries: Any) -> np.ndarray[Any, Any]:
    """Queries of any type as numbers that grow, which is what XGBoost takes."""
    sizes = group_sizes(queries)
    return np.repeat(np.arange(len(sizes)), sizes)


class _AfterRound(xgboost.callback.TrainingCallback):
    """Reports each round, and stops early by XGBoost's own rule.

    What the rule remembers is kept in the model's attributes: a restart goes on with it.
    """

    def __init__(self, session: Session, patience: int | None) -> None:
        self._session = session
        self._patience = patience

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        # The model counts all rounds; `epoch` only those since the restart.
        rounds = model.num_boosted_rounds()
        metrics = {
            f"{data}-{metric}": float(scores[-1])
            for data, of_data in evals_log.items()
            for metric, scores in of_data.items()
        }
        # First, so that a checkpoint of this round holds what is noted here.
        stop = self._patience is not None and self._is_exhausted(model, rounds - 1, metrics)
        self._session.report(step=rounds, metrics=metrics, model=model)
        return stop

    def _is_exhausted(self, model: Any, round_: int, metrics: Mapping[str, float]) -> bool:
        name, score = list(metrics.items())[-1]
        metric = name.rpartition("-")[2]
        # "mape" is a loss whose name begins like the gain "map".
        maximize = metric.startswith(_MAXIMIZED) and metric != "mape"
        best = model.attr("best_score")
        if best is None or (score > float(best) if maximize else score < float(best)):
            model.set_attr(best_score=repr(score), best_iteration=str(round_))
        return _stale_rounds(model) >= self._patience


def _stale_rounds(booster: xgboost.Booster) -> int:
    """Rounds since the best one."""
    return booster.num_boosted_rounds() - 1 - int(booster.best_iteration)


def _has_stopped(booster: xgboost.Booster, options: XGBoost) -> bool:
    """Whether early stopping had ended training when this model was saved."""
    patience = options.early_stopping_rounds
    return patience is not None and _stale_rounds(booster) >= patience
