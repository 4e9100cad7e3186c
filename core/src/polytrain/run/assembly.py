"""Assembles the driver of a run: opens what its controller uses, and registers its release."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from polytrain import satellites
from polytrain.events.attempt import DrainWanted, stop_wanted
from polytrain.events.driver import (
    DriverEvent,
    GitAnswered,
    Interrupted,
    LeaseLost,
    StacksWanted,
)
from polytrain.events.output import OutputRoute
from polytrain.output.call_queues import CallQueues
from polytrain.output.observers import Observers
from polytrain.output.worker_output import LiveBars, WorkerOutput, is_one_place, opened_output
from polytrain.policy.divergence import divergence_rule
from polytrain.policy.failure import FailurePolicy
from polytrain.record.entries import CodeContent
from polytrain.record.journal import Journal
from polytrain.run.attached_work import AttachedWork
from polytrain.run.background_tasks import BackgroundTasks
from polytrain.run.checkpoint_coordinator import CheckpointCoordinator
from polytrain.run.config_changes import ConfigChanges
from polytrain.run.controller import Controller
from polytrain.run.deadlines import Deadlines
from polytrain.run.health_monitor import HealthMonitor, StacksAnswers
from polytrain.run.identity import code_of, salt_of
from polytrain.run.interrupts import Interrupts
from polytrain.run.program import CommitSearch
from polytrain.run.publisher import Publisher
from polytrain.run.requests import RemoteRequests
from polytrain.run.run import Run
from polytrain.run.states import State
from polytrain.run.survivors import Survivors
from polytrain.run.validation_results import ValidationResults
from polytrain.workers.agents.agent_spec import agent_spec
from polytrain.workers.driver.agent_group import AgentGroup
from polytrain.workers.driver.group import Mailbox, WorkerGroup


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
        observers: the user's observers and polytrain's own.
        queues: for writes to streams and logs.
        hooks: for calls of the user's callbacks.
        bars: the ranks' progress bars, for the display of progress.
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
    mailbox = Mailbox()
    group = _group(run, observers, bars, mailbox)
    background_tasks = stack.enter_context(
        BackgroundTasks(mailbox=mailbox, at_once=run.spec.is_inline)
    )
    # Close it after the workers: it may have restarted the zygote that they share.
    attached = _attached_work(run, group, journal, mailbox, stack)
    workers = stack.enter_context(contextlib.ExitStack())
    workers.callback(group.close)
    controller = connected(
        run,
        journal,
        group=group,
        mailbox=mailbox,
        output=output,
        observers=observers,
        background_tasks=background_tasks,
        attached=attached,
        release_workers=workers.close,
        interrupts=interrupts,
        commit_search=CommitSearch(
            wake=lambda: mailbox.put((GitAnswered(),)), at_once=run.spec.is_inline
        ),
    )
    stack.enter_context(controller.stacks_answers.remote_requests)
    return controller


def connected(
    run: Run,
    journal: Journal,
    *,
    group: WorkerGroup,
    mailbox: Mailbox,
    output: WorkerOutput,
    observers: Observers,
    background_tasks: BackgroundTasks,
    attached: AttachedWork | None,
    release_workers: Callable[[], None],
    interrupts: Interrupts,
    commit_search: CommitSearch | None = None,
) -> Controller:
    """Make a controller of parts that are open; it starts and closes nothing."""
    deadlines = Deadlines()

    def post(event: DriverEvent | DrainWanted) -> None:
        mailbox.put((event,))

    run.lease.notify(lambda: post(LeaseLost()))
    run.stop_requests.notify(
        lambda stopped: post(stop_wanted(stopped)), wake=lambda: post(Interrupted())
    )
    failure = run.spec.run_config.failure_config
    rule = divergence_rule(failure)
    run.manager.divergences = journal.history.divergences
    run.manager.spares_previous = rule is not None and run.spec.world_size > 1
    checkpoints = CheckpointCoordinator(
        run=run.info,
        group=group,
        manager=run.manager,
        lease=run.lease,
        journal=journal,
        background_tasks=background_tasks,
        observers=observers,
        deadlines=deadlines,
        attached=attached,
    )
    return Controller(
        state=State(
            world_size=run.spec.world_size,
            policy=FailurePolicy(
                config=failure,
                rollbacks=tuple(map(str, journal.history.divergences.rollbacks)),
            ),
            committed=run.start.step,
            saves=run.start.own or run.spec.saves_by_itself,
        ),
        group=group,
        checkpoints=checkpoints,
        survivors=Survivors(
            group=group,
            journal=journal,
            deadlines=deadlines,
            has_copies=run.spec.run_config.checkpoint_config.memory is not None,
        ),
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
            config=failure, group=group, journal=journal, deadlines=deadlines
        ),
        stacks_answers=StacksAnswers(
            group=group,
            remote_requests=RemoteRequests(
                replace(run.location, retry_s=0).open(),
                run.lease.token,
                stop=run.stop_requests.request,
                stacks=lambda request: post(StacksWanted(request)),
                inline_thread=threading.get_ident() if run.spec.is_inline else None,
            ),
            background_tasks=background_tasks,
            deadlines=deadlines,
        ),
        mailbox=mailbox,
        deadlines=deadlines,
        validation_results=ValidationResults(attached=attached, release_workers=release_workers),
        commit_search=commit_search,
        stop_rule=run.stop_rule,
        config_changes=None
        if failure.on_rollback is None
        else ConfigChanges(spec=run.spec, function=failure.on_rollback),
        virtual_workers=run.spec.scaling_config.virtual_workers,
        code_after=partial(_code_after, run),
        divergence_rule=rule,
        interrupts=interrupts,
    )


def _code_after(run: Run) -> CodeContent | None:
    """Return what the code is now, if training in this process has changed what it holds."""
    if not run.spec.is_inline:
        return None
    configs = {dataset.name: dataset.config for dataset in run.datasets}
    now = code_of(run.spec, datasets=configs, salt=salt_of(run.identity))
    return None if now.items() <= run.identity["content"].items() else now


def _attached_work(
    run: Run,
    group: WorkerGroup,
    journal: Journal,
    mailbox: Mailbox,
    stack: contextlib.ExitStack,
) -> AttachedWork | None:
    # Even without a function, validations of earlier drivers may be pending.
    if run.spec.validation_config is None and not run.manager.validations:
        return None
    return stack.enter_context(satellites.validation.opened(run, group, journal, mailbox))


def _group(run: Run, observers: Observers, bars: LiveBars, mailbox: Mailbox) -> WorkerGroup:
    if run.spec.is_inline:
        from polytrain.workers.driver.inline_group import InlineGroup

        return InlineGroup(
            run=run.spec,
            store=run.manager.store,
            demand=run.demand,
            datasets=run.datasets,
            specs=run.shard_specs,
            mailbox=mailbox,
        )
    assert run.cluster is not None, "a run that isn't inline has a cluster"
    config = run.spec.run_config
    return AgentGroup(
        run=run.spec,
        demand=run.demand,
        datasets=run.datasets,
        specs=run.shard_specs,
        agents=agent_spec(
            run.spec,
            run.demand,
            store=run.manager.store,
            with_data=bool(run.datasets),
            path=run.import_path,
            marker=run.lease.path,
            versions=run.manager.versions,
            passes_all_reports=observers.want_every_rank
            or bool(config.callbacks)
            or config.keep_reports == "every_rank",
            route=OutputRoute(
                one_pipe=is_one_place(),
                shows_bars=bars.are_shown and config.show_output != "none",
            ),
        ),
        cluster=run.cluster,
        mailbox=mailbox,
    )
