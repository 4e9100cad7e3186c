"""The backend of `polytrain new-backend`, one method broken at a time.

The kit's tests of them are elsewhere (`broken_methods_in_kit`), so that worker processes don't
import the kit. It needs the template's `src` to be importable.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from polytrain_mylib import Mylib
from polytrain_mylib.engine import MODEL_FILE, MylibEngine
from polytrain_mylib.model import LinearModel, Numbers

from polytrain_plugins import (
    Capabilities,
    Demand,
    Device,
    Engine,
    Job,
    Member,
    Offer,
    Problem,
    Session,
    Shard,
    World,
)

ALL = Mylib.capabilities


class Untouched(Mylib):
    """Nothing is broken."""


# The driver half.


@dataclass(frozen=True, kw_only=True)
class HoldsALock(Mylib):
    """An option is an open resource."""

    lock: Any = field(default_factory=threading.Lock)


class NamesNoOption(Mylib):
    mutable_on_resume: ClassVar[frozenset[str]] = frozenset({"round"})


class ImportsTheLibraryInTheDriver(Mylib):
    requires: ClassVar[Mapping[str, str]] = {"sqlite3": "pip install sqlite3"}

    def problems(self, job: Job) -> Iterable[Problem]:
        import sqlite3  # noqa: F401

        return super().problems(job)


class RefusesTheDeviceThatItClaims(Mylib):
    capabilities: ClassVar[Capabilities] = replace(ALL, devices=frozenset({Device.CPU, Device.GPU}))

    def problems(self, job: Job) -> Iterable[Problem]:
        yield from super().problems(job)
        if job.use_gpu:
            yield Problem(field="use_gpu", what="it is set", remedy="Leave it out")


class DoesNotClaimToTrain(Mylib):
    capabilities: ClassVar[Capabilities] = replace(ALL, declarative=False)


class DoesNotClaimToPredict(Mylib):
    capabilities: ClassVar[Capabilities] = replace(ALL, predictive=False)


class ClaimsExactScaling(Mylib):
    """Its sums are rounded differently with other numbers of ranks."""

    capabilities: ClassVar[Capabilities] = replace(ALL, exact_scaling=True)


class CountsTooFewSteps(Mylib):
    @property
    def total_steps(self) -> int:
        return self.rounds - 1


class CountsHalfSteps(Mylib):
    @property
    def total_steps(self) -> Any:
        return self.rounds / 1


class WantsEveryRowOnEveryRank(Mylib):
    def demand(self, job: Job) -> Demand:
        return replace(super().demand(job), whole_datasets=frozenset({"train"}))


# The engine.


class _Engine(MylibEngine):
    """What engines here share: the rank."""

    rank = 0

    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        self.rank = world.me.rank
        with super().joined(world):
            yield


_FORGOTTEN: list[socket.socket] = []


class _LeaksAPort(_Engine):
    @contextmanager
    def offering(self, me: Member) -> Iterator[Offer]:
        _FORGOTTEN.append(socket.create_server(("127.0.0.1", 0)))
        with super().offering(me) as offer:
            yield offer


class _ListensForEverybody(_Engine):
    @contextmanager
    def offering(self, me: Member) -> Iterator[Offer]:
        with socket.create_server(("", 0)), super().offering(me) as offer:
            yield offer


_SERVER = "import socket; s = socket.create_server(('', 0)); print(flush=True); s.accept()"


class _HasAHelperListenForEverybody(_Engine):
    @contextmanager
    def offering(self, me: Member) -> Iterator[Offer]:
        command = [sys.executable, "-c", _SERVER]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as helper:
            assert helper.stdout is not None
            helper.stdout.readline()
            with super().offering(me) as offer:
                yield offer
            helper.kill()


class _ListensAtAFixedPort(_Engine):
    @contextmanager
    def offering(self, me: Member) -> Iterator[Offer]:
        with socket.create_server((me.listen_host, 9876 + me.rank)), super().offering(me) as offer:
            yield offer


class _LeaksAVariable(_Engine):
    @contextmanager
    def offering(self, me: Member) -> Iterator[Offer]:
        os.environ["BROKEN_RANK"] = str(me.rank)
        with super().offering(me) as offer:
            yield offer


class _SkipsTheJoin(_Engine):
    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        # A collective of this rank alone.
        first = world.members[:1]
        alone = replace(world, me=first[0], members=first, offers=world.offers[:1])
        with super().joined(alone):
            yield

    def sum_over_ranks(self, values: Sequence[int], world: World) -> list[int]:
        from polytrain.testing.contract import kit_table

        return [world.size, *(kit_table().num_rows for _ in values[1:])]


class _LeavesAProcess(_Engine):
    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        subprocess.Popen(["sleep", "600"])
        with super().joined(world):
            yield


class _NeedsTwoRanks(_Engine):
    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        assert world.size > 1
        with super().joined(world):
            yield


class _SumsNothing(_Engine):
    def sum_over_ranks(self, values: Sequence[int], world: World) -> list[int]:
        return list(values)


class _SumsInFloat32(_Engine):
    def sum_over_ranks(self, values: Sequence[int], world: World) -> list[int]:
        summed = self._collective.sum(np.array(values, dtype=np.float32))
        return [int(value) for value in summed]

    def gather_over_ranks(self, piece: bytes, world: World, *, call: str) -> list[bytes]:
        return Engine.gather_over_ranks(self, piece, world, call=call)


class _GathersInReverse(_Engine):
    def gather_over_ranks(self, piece: bytes, world: World, *, call: str) -> list[bytes]:
        return super().gather_over_ranks(piece, world, call=call)[::-1]


class _CutsWhatItGathers(_Engine):
    def gather_over_ranks(self, piece: bytes, world: World, *, call: str) -> list[bytes]:
        return super().gather_over_ranks(piece[:65536], world, call=call)


class _DropsTheLastBatch(_Engine):
    def train(self, shards: Mapping[str, Shard], session: Session) -> LinearModel:
        return super().train({"train": _WholeBatches(shards["train"])}, session)  # type: ignore[dict-item]


class _AveragesMeans(_Engine):
    def train(self, shards: Mapping[str, Shard], session: Session) -> LinearModel:
        table = shards["train"].to_arrow()
        model = LinearModel.untrained(["x0", "x1", "x2"])
        features = np.column_stack([table.column(name).to_numpy() for name in model.columns])
        labels = table.column("label").to_numpy()
        if session.checkpoint is not None:
            model = self.load(session.checkpoint)
        while model.rounds < self._options.rounds:
            mine = model.sums(features, labels) / len(labels)
            model = model.stepped(self._collective.sum(mine), self._options.learning_rate)
            session.report(step=model.rounds, metrics={}, model=model)
        return model


class _WholeBatches:
    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def to_arrow(self) -> pa.Table:
        table = self._shard.to_arrow()
        return table.slice(0, table.num_rows // 10 * 10)


class _TrainsAlone(_Engine):
    def train(self, shards: Mapping[str, Shard], session: Session) -> LinearModel:
        self._collective.sum = lambda array: array  # type: ignore[method-assign]
        return super().train(shards, session)


class _StartsFromTheBeginning(_Engine):
    def train(self, shards: Mapping[str, Shard], session: Session) -> LinearModel:
        return super().train(shards, _Changed(session, checkpoint=None))


class _ReportsOnRank0Alone(_Engine):
    def train(self, shards: Mapping[str, Shard], session: Session) -> LinearModel:
        report = session.report if self.rank == 0 else lambda **_: None
        return super().train(shards, _Changed(session, report=report))


class _CountsStepsFrom0(_Engine):
    def train(self, shards: Mapping[str, Shard], session: Session) -> LinearModel:
        def report(*, step: int, **rest: Any) -> None:
            session.report(step=step - 1, **rest)

        return super().train(shards, _Changed(session, report=report))


class _Changed:
    """A session, some of whose attributes are others."""

    def __init__(self, session: Session, **changed: Any) -> None:
        self._session = session
        self.__dict__.update(changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


class _ForgetsTheRounds(_Engine):
    def save(self, model: LinearModel, directory: Path) -> None:
        super().save(replace(model, rounds=0), directory)


class _SavesTheTime(_Engine):
    def save(self, model: LinearModel, directory: Path) -> None:
        super().save(model, directory)
        (directory / "saved.txt").write_text(str(time.time_ns()))


class _SavesNothing(_Engine):
    def save(self, model: LinearModel, directory: Path) -> None:
        pass


class _LoadsAnUntrainedModel(_Engine):
    def load(self, directory: Path) -> LinearModel:
        return LinearModel.untrained(super().load(directory).columns)


class _LoadsRoundedWeights(_Engine):
    def load(self, directory: Path) -> LinearModel:
        model = super().load(directory)
        return replace(model, weights=tuple(round(weight, 3) for weight in model.weights))


class _NeedsAsManyRanks(_Engine):
    size = 0

    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        self.size = world.size
        with super().joined(world):
            yield

    def save(self, model: LinearModel, directory: Path) -> None:
        super().save(model, directory)
        (directory / "ranks.txt").write_text(str(self.size))

    def load(self, directory: Path) -> LinearModel:
        assert str(self.size) in ("0", (directory / "ranks.txt").read_text())
        return super().load(directory)


class _LoadsOnceOnly(_Engine):
    def load(self, directory: Path) -> LinearModel:
        model = super().load(directory)
        (directory / MODEL_FILE).unlink()
        return model


class _PredictsByTheBatch(_Engine):
    def predict(self, model: LinearModel, table: pa.Table, **options: Any) -> Numbers:
        found = super().predict(model, table, **options)
        return found - found.mean()


class _PredictsInOrderOfSize(_Engine):
    def predict(self, model: LinearModel, table: pa.Table, **options: Any) -> Numbers:
        return np.sort(super().predict(model, table, **options))


class _ReadsColumnsByTheirPlace(_Engine):
    def model_columns(
        self, directory: Path, columns: Sequence[str], **options: Any
    ) -> Sequence[str]:
        return [name for name in columns if name != "label"]

    def predict(self, model: LinearModel, table: pa.Table, **options: Any) -> Numbers:
        return super().predict(model, table.rename_columns(list(model.columns)), **options)


class WithABrokenEngine(Mylib):
    """A sound driver half, and a broken engine."""

    broken: ClassVar[type[MylibEngine]]

    def engine(self) -> MylibEngine:
        return self.broken(self)


class LeaksAPort(WithABrokenEngine):
    broken = _LeaksAPort


class ListensForEverybody(WithABrokenEngine):
    broken = _ListensForEverybody


class HasAHelperListenForEverybody(WithABrokenEngine):
    broken = _HasAHelperListenForEverybody


class ListensAtAFixedPort(WithABrokenEngine):
    broken = _ListensAtAFixedPort


class LeaksAVariable(WithABrokenEngine):
    broken = _LeaksAVariable


class SkipsTheJoin(WithABrokenEngine):
    broken = _SkipsTheJoin


class LeavesAProcess(WithABrokenEngine):
    broken = _LeavesAProcess


class NeedsTwoRanks(WithABrokenEngine):
    broken = _NeedsTwoRanks


class SumsNothing(WithABrokenEngine):
    broken = _SumsNothing


class SumsInFloat32(WithABrokenEngine):
    broken = _SumsInFloat32


class GathersInReverse(WithABrokenEngine):
    broken = _GathersInReverse


class CutsWhatItGathers(WithABrokenEngine):
    broken = _CutsWhatItGathers


class DropsTheLastBatch(WithABrokenEngine):
    broken = _DropsTheLastBatch


class AveragesMeans(WithABrokenEngine):
    broken = _AveragesMeans


class TrainsAlone(WithABrokenEngine):
    broken = _TrainsAlone


class StartsFromTheBeginning(WithABrokenEngine):
    broken = _StartsFromTheBeginning


class ReportsOnRank0Alone(WithABrokenEngine):
    broken = _ReportsOnRank0Alone


class CountsStepsFrom0(WithABrokenEngine):
    broken = _CountsStepsFrom0


class ForgetsTheRounds(WithABrokenEngine):
    broken = _ForgetsTheRounds


class SavesTheTime(WithABrokenEngine):
    broken = _SavesTheTime


class SavesNothing(WithABrokenEngine):
    broken = _SavesNothing


class LoadsAnUntrainedModel(WithABrokenEngine):
    broken = _LoadsAnUntrainedModel


class LoadsRoundedWeights(WithABrokenEngine):
    broken = _LoadsRoundedWeights


class NeedsAsManyRanks(WithABrokenEngine):
    broken = _NeedsAsManyRanks


class LoadsOnceOnly(WithABrokenEngine):
    broken = _LoadsOnceOnly


class PredictsByTheBatch(WithABrokenEngine):
    broken = _PredictsByTheBatch


class PredictsInOrderOfSize(WithABrokenEngine):
    broken = _PredictsInOrderOfSize


class ReadsColumnsByTheirPlace(WithABrokenEngine):
    broken = _ReadsColumnsByTheirPlace
