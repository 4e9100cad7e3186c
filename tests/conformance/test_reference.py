"""The reference backends pass the kit: one for each kind of checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from polytrain.backends.reference import Reference, ReferenceEngine, Vector
from polytrain.testing import BackendConformance, KnownFailure
from polytrain_plugins import Capabilities, CheckpointKind, World


class ShardedReference(Reference):
    """The same backend, with checkpoints to which every rank contributes."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        declarative=True, predictive=True, checkpoint=CheckpointKind.EVERY_RANK
    )

    def engine(self) -> ReferenceEngine:
        return ShardedEngine(self)


class ShardedEngine(ReferenceEngine):
    """Gives each rank's files names of their own."""

    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        self.rank = world.me.rank
        with super().joined(world):
            yield

    def save(self, model: Vector, directory: Path) -> None:
        super().save(model, directory)
        for file in list(directory.iterdir()) if self.rank else ():
            file.rename(file.with_stem(f"{file.stem}-{self.rank}"))


class TestReference(BackendConformance):
    backend = Reference(rounds=8, label="label")


class TestShardedReference(BackendConformance):
    backend = ShardedReference(rounds=8, label="label")
    known_failures: ClassVar = {
        "test_is_found_by_its_name": KnownFailure(
            "It shares its name with the other reference backend, and is not registered.",
            raises=AssertionError,
        ),
    }
