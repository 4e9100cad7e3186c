"""What an engine raises before it has joined."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from polytrain.backends.reference import Reference, ReferenceEngine
from polytrain.checkpoint.manifest import AttemptId
from polytrain.checkpoint.starting_point import StartingPoint
from polytrain.config.run_spec import RunSpec
from polytrain.policy.placement import NodeAddress, members
from polytrain.storage.location import Location
from polytrain.workers.processes.channel import Channel, Message
from polytrain.workers.session.job import LaunchOrder, WorkerJob
from polytrain.workers.session.worker_process import run_worker


class Needy(Reference):
    def engine(self) -> ReferenceEngine:
        import module_of_nobody  # type: ignore[import-not-found]  # noqa: F401  # the mistake

        return ReferenceEngine(self)


class Sent(list[Message]):
    """A channel that keeps what it is given."""

    def send(self, *messages: Message) -> None:
        self += messages


def test_a_framework_that_the_node_lacks_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    """Engines import their frameworks where they are made."""
    sent = Sent()
    run_worker(
        job=WorkerJob(
            spec=RunSpec(backend=Needy()), near_staging=None, checkpoints=Location.of(tmp_path)
        ),
        order=LaunchOrder(
            attempt_id=AttemptId(token=0, attempt=0),
            members=members([NodeAddress(node_id="n", host="10.77.0.3")], cpus=1, gpus=0),
            start=StartingPoint(),
            first_checkpoint=0,
        ),
        rank=0,
        shards=lambda: {},
        channel=cast(Channel, sent),
        scratch=tmp_path,
    )
    [message] = sent
    text: Any = message[1]
    assert "If other nodes have the module 'module_of_nobody', this rank's lacks it" in text
