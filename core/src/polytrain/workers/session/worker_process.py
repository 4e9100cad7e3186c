"""The worker process: offer, join, train, leave. It owns nothing; a failed one is replaced."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from polytrain.checkpoint.scratch import temporary_directories_in
from polytrain.data_errors import text_of
from polytrain.events.output import flush_output
from polytrain.functions.function_checks import PLAIN_INSTEAD, deferred_value_kind
from polytrain.functions.pickling import note_missing_module, note_unreadable, pickled_error
from polytrain.functions.return_values import Returned, encoded
from polytrain.linux.nvidia_gpus import device_name
from polytrain.linux.progress_page import WorkerStage, enter, reports
from polytrain.policy.connections import Origins, is_broken_connection
from polytrain.text.described import numbered
from polytrain.workers.processes.channel import (
    Channel,
    ConnectionClosedError,
    Message,
    Ring,
    calls_every_s,
)
from polytrain.workers.processes.forked import open_streams
from polytrain.workers.processes.preload import ImportRecorder
from polytrain.workers.session.job import LaunchOrder, WorkerJob, unpickled_job
from polytrain.workers.session.messages import (
    LEAVE,
    joined_message,
    offer_message,
    world_from,
)
from polytrain.workers.session.raised_errors import raised_message
from polytrain.workers.session.session import WorkerSession
from polytrain.workers.session.worker_api import current_session
from polytrain_plugins import Engine, Member, World
from polytrain_plugins.returned import engine_of, join, offered, summed

if TYPE_CHECKING:
    from polytrain.data.shards.shard import BatchedShard
    from polytrain.data.shards.shared_memory import Extent


class JoinError(Exception):
    """The framework's collective doesn't span all ranks, or not all rows."""


def run_worker(
    *,
    job: WorkerJob,
    order: LaunchOrder,
    rank: int,
    shards: Callable[[], Mapping[str, BatchedShard]],
    channel: Channel,
    scratch: Path,
    passes: tuple[type[BaseException], ...] = (),
) -> None:
    """Run one attempt's worker process to its end, in this process.

    Sends every outcome over the channel, including exceptions of the training.

    Args:
        rank: this worker process's rank.
        shards: opens this rank's shards.
        passes: exceptions that aren't the training's, and are raised here. In the user's own
            process, `KeyboardInterrupt` is one. A worker process gets no SIGINT from a terminal.

    Raises:
        ConnectionClosedError: the agent is gone.
    """
    passes = (ConnectionClosedError, *passes)
    host = order.members[rank].host
    try:
        job = job.changed(order)
        engine = engine_of(job.spec.backend)
        with contextlib.ExitStack() as stack:
            enter(WorkerStage.OFFERING)
            channel.send(offer_message(offered(stack, engine, order.members[rank])))
            world = world_from(
                channel.receive(),
                attempt=order.attempt,
                members=order.members,
                rank=rank,
                virtual_workers=job.spec.scaling_config.virtual_workers,
            )
            enter(WorkerStage.JOINING)
            join(stack, engine, world)
            staying = partial(_staying, channel, job, host=host, passes=passes)
            with staying():
                opened = shards()
                _check_sums(engine, world, opened)
                enter(WorkerStage.TRAINING)
                channel.send(_joined_message(order.members[rank], opened))
                session = WorkerSession(
                    job=job,
                    order=order,
                    world=world,
                    engine=engine,
                    shards=opened,
                    channel=channel,
                    scratch=scratch,
                )
            with current_session(session), staying():
                try:
                    with _children_end_here(rank):
                        returned = _train(job, engine, opened, session)
                finally:
                    session.survivor.has_ended = True
            enter(WorkerStage.DONE)
            session.done(returned)
            # Don't close the collective while a slower rank may need it.
            while channel.receive() != LEAVE:
                pass
    except passes:
        raise
    except BaseException as error:
        _send_error(error, channel, job, host=host)


def _send_error(error: BaseException, channel: Channel, job: WorkerJob, *, host: str) -> None:
    note_missing_module(error, host)
    # Flush output without a newline, which may hold the reason.
    flush_output()
    _explain_pickling(error)
    # Import it late: few backends use it.
    from polytrain.workers.session.socket_collective import MODULES

    backend = job.spec.backend
    lost = is_broken_connection(error, Origins.of(backend, backend.requires, MODULES))
    channel.send(raised_message(error, pickled_error(error), connection_lost=lost))


@contextlib.contextmanager
def _staying(
    channel: Channel, job: WorkerJob, *, host: str, passes: tuple[type[BaseException], ...]
) -> Iterator[None]:
    """Send an error of this block, and stay in the collective until the driver kills all ranks.

    Without this rank peers fail too, and their errors could arrive first.
    """
    try:
        yield
    except passes:
        raise
    except BaseException as error:
        _send_error(error, channel, job, host=host)
        while True:
            channel.receive()


@contextlib.contextmanager
def _children_end_here(rank: int) -> Iterator[None]:
    """End a child that the training function has forked when it leaves this block.

    Otherwise it would send its parent's messages and close its parent's connections.
    """
    launched = os.getpid()
    code = 0
    try:
        yield
    except BaseException as error:
        if os.getpid() == launched:
            raise
        code = 1
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        else:
            traceback.print_exc()
    if os.getpid() != launched:
        print(
            f"[polytrain: process {os.getpid()}, which rank {rank} has forked, has left the "
            "training function and was ended. End such processes with os._exit]",
            file=sys.stderr,
        )
        flush_output()
        os._exit(code)


def _train(
    job: WorkerJob,
    engine: Engine[Any],
    shards: Mapping[str, BatchedShard],
    session: WorkerSession,
) -> Returned | None:
    """Train; return the training function's return value, unless that is None."""
    function, config = job.spec.train_loop_per_worker, job.spec.train_loop_config
    if function is None:
        session.finish(engine.train(shards, session))
        return None
    try:
        # An inline run's config is the user's own, which a function may change.
        value = function() if config is None else function(copy.copy(config))
    except SystemExit as exit:
        if exit.code not in (None, 0):
            raise
        # As at the end of a program, this is success.
        value = None
    deferred = deferred_value_kind(value)
    if deferred is not None:
        raise TypeError(
            f"The training function returned {deferred}, and trained nothing. "
            f"{PLAIN_INSTEAD[deferred]}."
        )
    world = session.world
    return None if value is None else encoded(value, rank=world.me.rank, world_size=world.size)


def _joined_message(member: Member, shards: Mapping[str, BatchedShard]) -> Message:
    counted = {name: shard.count() for name, shard in shards.items()}
    return joined_message(
        {name: rows for name, rows in counted.items() if rows is not None},
        device=device_name(member.gpus, os.environ),
        node=os.uname().nodename,
    )


def _check_sums(engine: Engine[Any], world: World, shards: Mapping[str, BatchedShard]) -> None:
    """Check that the collective spans all ranks, and that their rows add up to each data set."""
    counts = {n: s.count() for n, s in shards.items() if not s.is_whole}
    known = {name: rows for name, rows in counts.items() if rows is not None}
    spanned, *sums = summed(engine, [1, *known.values()], world)
    if spanned != world.size:
        raise JoinError(
            f"{type(engine).__name__}'s collective spans {spanned} of {world.size} ranks: each "
            "part would train a model of its own. Engine.joined must enter the collective."
        )
    for name, rows in zip(known, sums, strict=True):
        expected = shards[name].total_rows
        if rows != expected:
            raise JoinError(
                f"The workers have {numbered(rows, 'row')} of the data set {name!r}, which has "
                f"{expected}: the model would be trained on other rows than it should be. "
                "If its files have changed since the run began, start a new run."
            )


def main(connection: socket.socket, descriptors: Sequence[int]) -> int:
    """Run the body of a worker process. The agent's first message holds the attempt's order.

    Args:
        descriptors: memory of the job, of the data sets' specs, and of the rows that the agent
            holds; last, connections to the agent for streaming data sets.

    Returns:
        The exit code: 0, or 1 if the agent is gone.
    """
    explain_breakpoints()
    channel = ImportRecorder(connection)
    try:
        job_in, *data_descriptors = descriptors
        _, pickled_order, rank, scratch = channel.receive()
        order: LaunchOrder
        order, extents, streams, route = pickle.loads(pickled_order)
        open_streams(route)
        channel.gather_reports(Ring(reports()), calls_every_s=calls_every_s(rank))
        with temporary_directories_in(Path(scratch), rank=rank, attempt=order.attempt):
            try:
                job = unpickled_job(job_in)
            except BaseException as error:
                what = "The training function, its config or the backend"
                note_unreadable(error, what, order.members[rank].host)
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
    # Import it late: Arrow is preloaded if there is data, and otherwise not imported.
    from polytrain.data.shards.opening import open_shards
    from polytrain.data.shards.shared_memory import from_shared_memory, mapped
    from polytrain.workers.session.stream_connection import StreamConnection

    specs_in, *others = descriptors
    specs_extent, *table_extents = extents
    tables_in, lines_in = others[: len(others) - streams], others[len(others) - streams :]
    return open_shards(
        pickle.loads(mapped(specs_in, specs_extent)),
        map(from_shared_memory, tables_in, table_extents),
        order.start.positions,
        skipped=order.start.skipped,
        world_size=len(order.members),
        rank=rank,
        local_world_size=order.members[rank].local_world_size,
        streams=[StreamConnection(socket.socket(fileno=line)) for line in lines_in],
    )


def explain_breakpoints() -> None:
    """Make `breakpoint()` explain how to debug, unless the user has set PYTHONBREAKPOINT."""
    chosen = os.environ.get("PYTHONBREAKPOINT", "")
    # Ray sets the variable to its own debugger, which works only in Ray's processes.
    if not chosen or chosen.startswith("ray."):
        sys.breakpointhook = _explain


def _explain(*arguments: Any, **named: Any) -> NoReturn:
    raise RuntimeError(
        "breakpoint() needs a terminal, and a worker process has none. Train in this process with "
        "ScalingConfig(num_workers=0), where breakpoints work, or let a debugger attach to one "
        "rank: debugpy.listen(5678); debugpy.wait_for_client()"
    )


def _explain_pickling(error: BaseException) -> None:
    """Add a note to an error of pickling objects that only the script's `__main__` defines."""
    text = text_of(error)
    is_pickling = isinstance(error, pickle.PicklingError | AttributeError) and "pickle" in text
    if is_pickling and any(part in text for part in ("__main__", "<locals>", "import of module")):
        error.add_note(
            "Processes of multiprocessing get functions and classes by name, and worker processes "
            "don't have the script's as their `__main__`. Move them into a module beside the "
            "script. A data loader whose processes are forked, torch's default, needs no names."
        )
