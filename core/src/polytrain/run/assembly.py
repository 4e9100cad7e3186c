"""Makes the controller of a run, and all that it needs."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from dataclasses import replace

from polytrain.output.call_queues import CallQueues
from polytrain.output.observers import Observers
from polytrain.output.worker_output import WorkerOutput
from polytrain.policy.failure import FailurePolicy
from polytrain.ray_names.callbacks import TrainRunContext, UserCallbacks
from polytrain.record.journal import Journal
from polytrain.run.background_tasks import BackgroundTasks
from polytrain.run.checkpoint_coordinator import CheckpointCoordinator
from polytrain.run.controller import Controller
from polytrain.run.health_monitor import HealthMonitor
from polytrain.run.interrupts import Interrupts
from polytrain.run.output import opened_output
from polytrain.run.publisher import Publisher
from polytrain.run.remote_requests import RemoteRequests
from polytrain.run.run import Run
from polytrain.run.states import State
from polytrain.validation.available import opened_validator
from polytrain.validation.coordinator import ValidationCoordinator
from polytrain.workers.driver.agent_group import AgentGroup, AgentGroupSpec
from polytrain.workers.driver.group import WorkerGroup


def controller_of(
    run: Run,
    journal: Journal,
    observers: Observers,
    queues: CallQueues,
    hooks: CallQueues,
    interrupts: Interrupts,
    stack: contextlib.ExitStack,
) -> Controller:
    """Make a run's controller, with all that it needs.

    Args:
        run: the run.
        journal: its open journal.
        observers: the user's and polytrain's own.
        queues: write to streams and logs.
        hooks: call the user's callbacks.
        interrupts: takes signals.
        stack: closes everything, in reverse order.
    """
    # The end of a run waits for them once all that it holds is released.
    callbacks = stack.enter_context(_callbacks(run, hooks))
    output = stack.enter_context(opened_output(run, queues))
    group = _group(run, observers)
    background_tasks = stack.enter_context(
        BackgroundTasks(wake=group.wake, at_once=run.spec.is_inline)
    )
    # Closed after the workers are: it may have restarted the zygote that they share.
    validations = stack.enter_context(_validations(run, group, journal, output))
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
        validations=validations,
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
        callbacks=callbacks,
        output=output,
        health_monitor=HealthMonitor(
            config=run.spec.run_config.failure_config, group=group, journal=journal
        ),
        validations=validations,
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


def _callbacks(run: Run, hooks: CallQueues) -> UserCallbacks:
    context = TrainRunContext(
        run=run.info,
        run_config=run.spec.run_config,
        scaling_config=run.spec.scaling_config,
        train_loop_config=run.spec.train_loop_config,
    )
    return UserCallbacks(
        run.spec.run_config.callbacks, context, run.location.filesystem, queues=hooks
    )


def _validations(
    run: Run, group: WorkerGroup, journal: Journal, output: WorkerOutput
) -> ValidationCoordinator:
    coordinator = ValidationCoordinator(
        config=run.spec.validation_config,
        manager=run.manager,
        journal=journal,
        wake=group.wake,
        show=output.write,
    )
    if run.spec.validation_config is not None:
        coordinator.validator = opened_validator(
            run.spec.validation_config,
            group=group,
            demand=run.demand,
            threads=run.spec.scaling_config.cpus_per_worker,
            is_local=run.choice is None or run.choice.is_local,
            path=_import_path(),
            runtime_env=run.spec.run_config.worker_runtime_env,
            tell=coordinator.tell,
        )
    return coordinator


def _group(run: Run, observers: Observers) -> WorkerGroup:
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
            path=_import_path(),
        ),
        run.cluster,
    )


def _import_path() -> tuple[str, ...]:
    # At the interactive prompt the path has the working directory as "".
    return tuple(entry or os.getcwd() for entry in sys.path)
