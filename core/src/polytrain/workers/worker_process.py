"""A worker's life: offer, join, train, leave. It owns nothing, and is replaced, not repaired."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import cloudpickle

from polytrain.common.processes import die_with_parent
from polytrain.monitoring.progress_page import Stage, enter, reports, write_to
from polytrain.monitoring.stacks import be_readable
from polytrain.workers.job import LaunchOrder, WorkerJob
from polytrain.workers.messages import (
    Channel,
    ConnectionClosedError,
    done_message,
    joined_message,
    leave_message,
    offer_message,
    raised_message,
    world_from,
)
from polytrain.workers.processes.preload import ImportRecorder
from polytrain.workers.report_ring import Ring, calls_every_s
from polytrain.workers.session import TrainerSession, current_session
from polytrain_plugins import Engine, World

if TYPE_CHECKING:
    from polytrain.data.shards.batched import BatchedShard
    from polytrain.data.shards.shared_memory import Extent


class JoinError(Exception):
    """The framework's collective doesn't span the world, or not all of the data."""


def run_worker(
    *,
    job: WorkerJob,
    order: LaunchOrder,
    rank: int,
    shards: Callable[[], Mapping[str, BatchedShard]],
    channel: Channel,
    scratch: Path,
) -> None:
    """Run one worker process of one attempt to its end, in this process.

    Every outcome is told over the channel, exceptions of the training too, which end here.

    Args:
        job: what to train.
        order: in which attempt.
        rank: which rank of it.
        shards: opens this rank's shards.
        channel: to whom it is told.
        scratch: directory on the node for files on their way to the storage.

    Raises:
        ConnectionClosedError: nobody listens any more.
        KeyboardInterrupt: the user wants it to end.
    """
    try:
        engine = job.backend.engine()
        with contextlib.ExitStack() as stack:
            enter(Stage.OFFERING)
            offer = stack.enter_context(engine.offering(order.members[rank]))
            channel.send(offer_message(offer))
            world = world_from(
                channel.receive(), attempt=order.attempt, members=order.members, rank=rank
            )
            enter(Stage.JOINING)
            stack.enter_context(engine.joined(world))
            opened = shards()
            _check_sums(engine, world, opened)
            enter(Stage.TRAINING)
            channel.send(joined_message())
            session = TrainerSession(
                job=job,
                order=order,
                world=world,
                engine=engine,
                shards=opened,
                channel=channel,
                scratch=scratch,
            )
            with current_session(session):
                try:
                    _train(job, engine, opened, session)
                except (ConnectionClosedError, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    _tell(error, channel)
                    # Not out of the collective: the complaints of peers that miss this rank could
                    # be heard before what it has said. Whoever listens ends all of them.
                    while True:
                        channel.receive()
            enter(Stage.DONE)
            channel.send(done_message(session.stalled_s))
            # Nobody tears the collective down while a slower peer may still need it.
            while channel.receive() != leave_message():
                pass
    except (ConnectionClosedError, KeyboardInterrupt):
        raise
    except BaseException as error:
        _tell(error, channel)


def _tell(error: BaseException, channel: Channel) -> None:
    # Last words without a newline are still in a buffer, and may be the reason.
    _flush_output()
    channel.send(raised_message(error, _pickled(error)))


def _train(
    job: WorkerJob,
    engine: Engine[Any],
    shards: Mapping[str, BatchedShard],
    session: TrainerSession,
) -> None:
    if job.training_function is None:
        session.finish(engine.train(shards, session))
    elif job.training_config is None:
        job.training_function()
    else:
        job.training_function(dict(job.training_config))


def _check_sums(engine: Engine[Any], world: World, shards: Mapping[str, BatchedShard]) -> None:
    """Whether the collective spans the world, and every row is on one of its ranks."""
    counts = {n: s.count() for n, s in shards.items() if not s.is_whole}
    known = {name: rows for name, rows in counts.items() if rows is not None}
    spanned, *summed = engine.sum_over_ranks([1, *known.values()], world)
    if spanned != world.size:
        raise JoinError(
            f"{type(engine).__name__}'s collective spans {spanned} of {world.size} ranks: each "
            "part would train a model of its own. Engine.joined must enter the collective."
        )
    for name, rows in zip(known, summed, strict=True):
        expected = shards[name].total_rows
        if rows != expected:
            raise JoinError(
                f"The workers have {rows} rows of the data set {name!r}, which has "
                f"{expected}: the model would be trained on other rows than it should be. "
                "If its files have changed since the run began, begin anew."
            )


def _pickled(error: BaseException) -> bytes | None:
    try:
        pickled: bytes = cloudpickle.dumps(error)
    except Exception:  # whatever a user's exception holds, its text has been told already
        return None
    return pickled


def main(connection: socket.socket, data_descriptors: Sequence[int]) -> int:
    """The body of a worker process. The agent's first message says what to do.

    Args:
        connection: to its agent.
        data_descriptors: memory with what there is to know of the data sets, and with the rows
            that the agent holds; last, lines to it for the data sets that stream.

    Returns:
        The exit code: 0, or 1 if nobody listens any more.
    """
    channel = ImportRecorder(connection)
    try:
        _, pickled_job, pickled_order, rank, scratch = channel.receive()
        order: LaunchOrder
        order, extents, streams = pickle.loads(pickled_order)
        channel.gather_reports(Ring(reports()), calls_every_s=calls_every_s(rank))
        try:
            job: WorkerJob = pickle.loads(pickled_job)
        except Exception as error:
            error.add_note(
                "The training function, its config or the backend could not be read in the worker. "
                "Modules that it uses must be installed on every node, or lie beside the script."
            )
            channel.send(raised_message(error, None))
            return 0
        run_worker(
            job=job,
            order=order,
            rank=rank,
            shards=lambda: _shards(order, rank, data_descriptors, extents, streams),
            channel=channel,
            scratch=Path(scratch),
        )
    except ConnectionClosedError:
        return 1
    return 0


def _shards(
    order: LaunchOrder,
    rank: int,
    descriptors: Sequence[int],
    extents: Sequence[Extent | None],
    streams: int,
) -> dict[str, BatchedShard]:
    if not descriptors:
        return {}
    # Arrow is preloaded where there is data, and not imported where there is none.
    from polytrain.data.shards.opening import open_shards
    from polytrain.data.shards.shared_memory import from_shared_memory, mapped
    from polytrain.workers.stream_connection import StreamConnection

    specs_in, *others = descriptors
    tables_in, lines_in = others[: len(others) - streams], others[len(others) - streams :]
    return open_shards(
        pickle.loads(mapped(specs_in)),
        map(from_shared_memory, tables_in, extents),
        order.start.positions,
        world_size=len(order.members),
        rank=rank,
        streams=[StreamConnection(socket.socket(fileno=line)) for line in lines_in],
    )


def run_and_exit(connection: socket.socket, page: int, data_descriptors: Sequence[int]) -> NoReturn:
    """Run `main` and end the process, without returning into the frames that it was forked in."""
    code = 1
    try:
        write_to(page)
        be_readable(page)
        code = main(connection, data_descriptors)
        # What libraries have registered belongs to a normal end. The interpreter's own
        # finalisation is left out: frameworks take seconds for it, and there is nothing to save.
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        _flush_output()
        os._exit(code)


def _flush_output() -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


def spawned(connection_descriptor: int, page: int, *data_descriptors: int) -> NoReturn:
    """The same for a process that was exec'd instead of forked."""
    die_with_parent(os.getppid())
    run_and_exit(socket.socket(fileno=connection_descriptor), page, data_descriptors)
