"""The engine: connects an attempt's ranks by a tracker, and boosts."""

from __future__ import annotations

import io
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xgboost
from xgboost import collective
from xgboost.tracker import RabitTracker

from polytrain.boosting.round_reports import RoundReports, history_in
from polytrain_plugins import (
    Engine,
    Member,
    Offer,
    Session,
    Shard,
    World,
    changed_environment,
    held_port,
    nccl_variables,
    reached_at,
)
from polytrain_plugins.registry import install_line
from polytrain_xgboost.backend import XGBoost
from polytrain_xgboost.boosting import Boosting
from polytrain_xgboost.collective import Ranks, outside_the_collective
from polytrain_xgboost.continuing import check_booster, forget_best_round, trees_of
from polytrain_xgboost.evaluating import has_stopped
from polytrain_xgboost.external import spooled
from polytrain_xgboost.history import History
from polytrain_xgboost.intercept import marked_as_estimated
from polytrain_xgboost.kept_rounds import KeptRounds, can_keep
from polytrain_xgboost.matrices import features_of, prediction_matrix
from polytrain_xgboost.parameters import device_for, own_name

MODEL_FILE = "model.ubj"
HISTORY_FILE = "history.json"


class XGBoostEngine(Engine[xgboost.Booster]):
    """One rank of a collective. Rank 0 runs the tracker that connects the ranks."""

    def __init__(self, options: XGBoost) -> None:
        self._options = options
        self._tracker: RabitTracker | None = None
        self._boosting: Boosting | None = None
        self._history = History()

    @contextmanager
    def offering(self, me: Member) -> Iterator[Offer]:
        if me.rank != 0:
            yield Offer()
            return
        self._tracker = _started_tracker(me)
        yield Offer(details=dict(self._tracker.worker_args()))

    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        # Leading zeros, since the tracker sorts ids as strings.
        communicator = collective.CommunicatorContext(
            **world.leader.details, dmlc_task_id=f"{world.me.rank:08d}"
        )
        with ExitStack() as stack:
            stack.enter_context(changed_environment(nccl_variables(world.me)))
            # It takes no address to listen at. It prints the rank at any verbosity.
            with reached_at(_address_towards_tracker(world)), redirect_stdout(io.StringIO()):
                stack.enter_context(communicator)
            yield
        if self._tracker is not None:
            # The tracker must serve ranks that leave later than rank 0.
            self._tracker.wait_for()
            self._tracker.free()
            self._tracker = None

    def sum_over_ranks(self, values: Sequence[int], world: World) -> list[int]:
        sums = collective.allreduce(np.array(values, dtype=np.int64), collective.Op.SUM)
        return [int(number) for number in sums]

    def train(self, shards: Mapping[str, Shard], session: Session) -> xgboost.Booster:
        options, me = self._options, session.world.me
        if session.checkpoint is not None:
            history = history_in(session.checkpoint, HISTORY_FILE, option=options.model_option)
            self._history = History.from_json(history)
        self._history.continued_by(options.callbacks, options.params, own_name)
        if session.checkpoint is None:
            model = trees_of(options.xgb_model)
        else:
            model = self.load(session.checkpoint)
            if self._history.has_best and options.early_stopping_rounds is None:
                forget_best_round(model)
            if _is_finished(model, self._history, options):
                return model
        reported = len(self._history.rounds)
        if options.needs_all_rounds:
            self._history = History(callbacks=self._history.callbacks)
            model = trees_of(options.xgb_model)
        params = {
            "tree_method": "hist",
            "nthread": me.cpus,
            **device_for(options.params, me.gpus),
            **options.booster_params,
        }
        check_build(params)
        if model is not None:
            check_booster(model, params)
        state = KeptRounds(
            history=self._history,
            save=self._save,
            has_attributes=options.early_stopping_rounds is not None or bool(options.callbacks),
            scales_old_trees=params.get("booster") == "dart",
        )
        report = RoundReports(
            session, reported=reported, state=state if can_keep(options, params) else None
        )
        # Rank 0 evaluates, and sends the metrics to the others.
        shards = {name: shard for name, shard in shards.items() if name == "train" or me.rank == 0}
        directory = session.scratch if options.external_memory else None

        with outside_the_collective() as outside:
            self._boosting = Boosting(
                options=options,
                params=params,
                ranks=Ranks(me=me.rank, size=session.world.size),
                outside=outside,
                directory=directory,
                history=self._history,
            )
            tables = {name: shard.to_arrow() for name, shard in shards.items() if name != "train"}
            train = shards["train"]
            rows = train.to_arrow() if directory is None else spooled(train, directory)
            return self._boosting.train({"train": rows, **tables}, model, report)

    def save(self, model: xgboost.Booster, directory: Path) -> None:
        self._save(model, self._history, directory)

    def _save(self, model: xgboost.Booster, history: History, directory: Path) -> None:
        saved = bytes(model.save_raw())
        if self._boosting is not None and self._boosting.has_estimated:
            saved = marked_as_estimated(saved)
        (directory / MODEL_FILE).write_bytes(saved)
        (directory / HISTORY_FILE).write_text(history.to_json())

    def load(self, directory: Path) -> xgboost.Booster:
        return xgboost.Booster(model_file=directory / MODEL_FILE)

    def model_columns(self, directory: Path, columns: Sequence[str], **options: Any) -> list[str]:
        margin = self._options.base_margin
        features = features_of(self.load(directory))
        return features if margin is None or margin not in columns else [*features, margin]

    def predict(
        self, model: xgboost.Booster, table: pa.Table, **options: Any
    ) -> np.ndarray[Any, Any]:
        best = model.attr("best_iteration")
        if best is not None:
            # XGBoost's estimators do the same.
            options = {"iteration_range": (0, int(best) + 1), **options}
        matrix = prediction_matrix(table, model, base_margin=self._options.base_margin)
        return np.asarray(model.predict(matrix, **options))


def _address_towards_tracker(world: World) -> str:
    """Return the address at which the tracker and the other ranks know this one."""
    tracker = world.leader.details["dmlc_tracker_uri"]
    # The port is any: connecting a socket of this type sends nothing.
    family, *_, target = socket.getaddrinfo(tracker, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        address: str = probe.getsockname()[0]
        return address


def _started_tracker(me: Member) -> RabitTracker:
    """Return a tracker that listens."""
    port = 0  # the system picks a free one
    if me.ports is not None:
        with held_port(me.ports) as held:
            held.release()
            port = held.number
    # Sorting by task id keeps the run's ranks.
    tracker = RabitTracker(
        n_workers=me.world_size, host_ip=me.listen_host, port=port, sortby="task"
    )
    tracker.start()
    return tracker


def check_build(params: Mapping[str, Any]) -> None:
    """Check that XGBoost can use the device: otherwise it would train on the CPU and only warn.

    Raises:
        RuntimeError: XGBoost was built without CUDA.
    """
    if params.get("device", "cpu") != "cpu" and not xgboost.build_info()["USE_CUDA"]:
        raise RuntimeError(
            "The installed xgboost was built without CUDA, so it can't use the workers' GPUs. "
            f"Install a build with CUDA: {install_line('xgboost')}"
        )


def _is_finished(booster: xgboost.Booster, history: History, options: XGBoost) -> bool:
    if len(history.rounds) >= options.num_boost_round or history.is_over:
        return True
    patience = options.early_stopping_rounds
    return patience is not None and has_stopped(booster, patience)
