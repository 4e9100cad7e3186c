"""Makes the controller of a run, and the objects that it uses."""

from __future__ import annotations

import contextlib
import sys
import threading
from dataclasses import replace

from polytrain import satellites
from polytrain.events.output import OutputRoute
from polytrain.output.call_queues import CallQueues
from polytrain.output.live_bars import LiveBars
from polytrain.output.observers import Observers
from polytrain.output.streams import are_one
from polytrain.output.worker_output import WorkerOutput, opened_output
from polytrain.policy.failure import FailurePolicy
from polytrain.record.journal import Journal
from polytrain.run.attached import AttachedWork
from polytrain.run.background_tasks import BackgroundTasks
from polytrain.run.checkpoint_coordinator import CheckpointCoordinator
from polytrain.run.controller import Controller
from polytrain.run.health_monitor import HealthMonitor
from polytrain.run.interrupts import Interrupts
from polytrain.run.publisher import Publisher
from polytrain.run.requests import RemoteRequests
from polytrain.run.run import Run
from polytrain.run.states import State
from polytrain.workers.driver.agent_group import AgentGroup, AgentGroupSpec
from polytrain.workers.driver.group import WorkerGroup


def controller_of(
    run: Run,
    journal: Journal,
    observers: Observers,
    queues: CallQueues,
    hooks: CallQueues,
    bars: LiveBars,
    interrupts: Interrupts,
    stack: contextlib.ExitStack,
) -> Controller:
    """Make a run's controller, with the objects that it uses.

    Args:
        run: the run.
        journal: its open journal.
        observers: the user's observers and polytrain's own.
        queues: for writes to streams and logs.
        hooks: for calls of the user's callbacks.
        bars: the ranks' progress bars, for the display of progress.
        interrupts: receives signals.
        stack: closes everything, in reverse order.
    """
    # The run waits for callbacks last, when all its resources are released.
    if run.spec.run_config.callbacks:
        callbacks = stack.enter_context(satellites.callbacks.opened(run, hooks))
        journal.news.subscribe(callbacks.take)
    output = stack.enter_context(
        opened_output(
            run.location,
            token=run.lease.token,
            show=run.spec.run_config.show_output,
            queues=queues,
            bars=bars,
        )
    )
    group = _group(run, observers, bars)
    background_tasks = stack.enter_context(
        BackgroundTasks(wake=group.wake, at_once=run.spec.is_inline)
    )
    # Close it after the workers: it may have restarted the zygote that they share.
    attached = stack.enter_context(_attached_work(run, group, journal, output))
    workers = stack.enter_context(contextlib.ExitStack())
    workers.callback(group.close)
    failure = run.spec.run_config.failure_config
    checkpoints = CheckpointCoordinator(
        run=run.info,
        group=group,
        manager=run.manager,
        lease=run.lease,
        journal=journal,
        background_tasks=background_tasks,
        observers=observers,
        attached=attached,
    )
    return Controller(
        state=State(
            world_size=run.spec.world_size,
            policy=FailurePolicy(
                max_failures=failure.max_failures, retry_user_errors=failure.retry_user_errors
            ),
            node_cooldown_s=failure.node_cooldown_s,
            committed=run.start.step,
            saves=run.start.own or run.spec.saves_by_itself,
        ),
        group=group,
        checkpoints=checkpoints,
        lease=run.lease,
        journal=journal,
        background_tasks=background_tasks,
        publisher=Publisher(
            run=run.info,
            journal=journal,
            observers=observers,
            background_tasks=background_tasks,
            output=output,
            keeps_all_reports=run.spec.run_config.keep_reports == "every_rank",
        ),
        output=output,
        health_monitor=HealthMonitor(
            config=run.spec.run_config.failure_config, group=group, journal=journal
        ),
        attached=attached,
        stop_requests=run.stop_requests,
        remote_requests=stack.enter_context(_remote_requests(run)),
        stop_rule=run.stop_rule,
        release_workers=workers.close,
        interrupts=interrupts,
    )


def _remote_requests(run: Run) -> RemoteRequests:
    is_inline = run.spec.is_inline
    return RemoteRequests(
        replace(run.location, retry_s=0).open(),
        run.lease.token,
        stop=run.stop_requests.request,
        inline_thread=threading.get_ident() if is_inline else None,
    )


def _attached_work(
    run: Run, group: WorkerGroup, journal: Journal, output: WorkerOutput
) -> AttachedWork:
    # Even without a function, validations of earlier drivers may be pending.
    if run.spec.validation_config is None and not run.manager.validations:
        return AttachedWork()
    return satellites.validation.opened(run, group, journal, output.write)


def _group(run: Run, observers: Observers, bars: LiveBars) -> WorkerGroup:
    if run.spec.is_inline:
        from polytrain.workers.driver.inline_group import InlineGroup

        return InlineGroup(
            run=run.spec,
            store=run.manager.store,
            demand=run.demand,
            datasets=run.datasets,
            specs=run.shard_specs,
        )
    assert run.cluster is not None, "a run that isn't inline has a cluster"
    config = run.spec.run_config
    return AgentGroup(
        AgentGroupSpec(
            run=run.spec,
            store=run.manager.store,
            demand=run.demand,
            datasets=run.datasets,
            specs=run.shard_specs,
            marker=run.lease.path,
            passes_all_reports=observers.want_every_rank
            or bool(config.callbacks)
            or config.keep_reports == "every_rank",
            route=OutputRoute(
                one_pipe=are_one(sys.stdout, sys.stderr),
                shows_bars=bars.are_shown and config.show_output != "none",
            ),
            path=run.import_path,
        ),
        run.cluster,
    )
