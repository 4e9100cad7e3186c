"""Backends that are broken on purpose, each in one way. `test_kit.py` shows that the kit notices.

The kit's tests of them are elsewhere (`broken_backends_in_kit`), so that worker processes don't
import the kit.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from polytrain.backends.reference import Reference, ReferenceEngine, Vector
from polytrain_plugins import Session, Shard, World


class SkipsTheJoin(Reference):
    """Every rank trains by itself, and says that all are there."""

    def engine(self) -> ReferenceEngine:
        return _AloneEngine(self)


class _AloneEngine(ReferenceEngine):
    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        first = world.members[:1]
        alone = replace(world, me=first[0], members=first, offers=world.offers[:1])
        with super().joined(alone):
            yield

    def sum_over_ranks(self, values: Sequence[int], world: World) -> list[int]:
        from polytrain.testing.contract import kit_table

        return [world.size, *(kit_table().num_rows for _ in values[1:])]


class DropsTheLastBatch(Reference):
    """What doesn't fill a batch is left out."""

    def engine(self) -> ReferenceEngine:
        return _DroppingEngine(self)


class _DroppingEngine(ReferenceEngine):
    def _matrix(self, shard: Shard) -> tuple[Vector, Vector]:
        features, labels = super()._matrix(shard)
        whole = len(labels) // 10 * 10
        return features[:whole], labels[:whole]


class LeaksAPort(Reference):
    """A server outlives the collective."""

    def engine(self) -> ReferenceEngine:
        return _ListeningEngine(self)


_FORGOTTEN: list[socket.socket] = []


class _ListeningEngine(ReferenceEngine):
    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        _FORGOTTEN.append(socket.create_server(("127.0.0.1", 0)))
        with super().joined(world):
            yield


class LeaksAVariable(Reference):
    """The environment isn't what it was."""

    def engine(self) -> ReferenceEngine:
        return _VariableEngine(self)


class _VariableEngine(ReferenceEngine):
    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        with super().joined(world):
            os.environ["BROKEN_RANK"] = str(world.me.rank)
            yield


class ForgetsItsPast(Reference):
    """What it saves depends on how many rounds it has trained since its start."""

    def engine(self) -> ReferenceEngine:
        return _ForgetfulEngine(self)


class _ForgetfulEngine(ReferenceEngine):
    def train(self, shards: Mapping[str, Shard], session: Session) -> Vector:
        self._rounds = 0
        return super().train(shards, session)

    def save(self, model: Vector, directory: Path) -> None:
        self._rounds += 1
        super().save(model * (1 - 0.1 / self._rounds), directory)
