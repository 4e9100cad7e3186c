"""Coordinates validations of checkpoints beside training, one at a time, and records them."""

from __future__ import annotations

import logging
import os
import queue
import secrets
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.checkpoint.manager import CheckpointManager
from polytrain.checkpoint.manifest import Manifest
from polytrain.config.runtime_env import runtime_env_of_validations, variables_of
from polytrain.config.validation_config import ValidationConfig, task_of
from polytrain.errors import Failure, FailureKind
from polytrain.events.driver import WorkEnded
from polytrain.events.output import Output
from polytrain.functions.pickling import code_in, pickled_for_ray, pickled_with
from polytrain.policy.validation import Validation, Validations, ValidationStatus
from polytrain.record.entries import ValidationEnded, ValidationRequested
from polytrain.record.journal import Journal
from polytrain.run.attached_work import AttachedWork
from polytrain.run.run import Run
from polytrain.text.metrics import flat
from polytrain.validation.local_validator import LocalValidator
from polytrain.validation.validator import NotValidated, Validated, ValidationTask, Validator
from polytrain.workers.agents.agent_spec import zygote_for
from polytrain.workers.driver.agent_group import AgentGroup
from polytrain.workers.driver.group import Mailbox, WorkerGroup
from polytrain.workers.processes.zygote_connection import zygote_name
from polytrain_plugins import Demand

logger = logging.getLogger(__name__)


_Ended = tuple[Validation, Validated | NotValidated | None]
"""A validation with its outcome; None if it was cancelled."""


class ValidationCoordinator(AttachedWork):
    """Runs a run's validations.

    One thread waits for the running validation. The controller's thread does everything else.
    """

    def __init__(
        self,
        *,
        config: ValidationConfig | None = None,
        validates_all: bool = False,
        manager: CheckpointManager,
        journal: Journal,
        mailbox: Mailbox,
    ) -> None:
        """
        Args:
            config: the user's configuration; None without validations.
            validates_all: whether no report of a training function requests validations.
            manager: the run's checkpoints, with the validations of earlier drivers.
            mailbox: the driver's mailbox.
        """
        self.validator: Validator | None = None
        """The validator; None without a validation function."""

        self._config = config
        self._validates_all = validates_all
        self._manager = manager
        self._journal = journal
        self._mailbox = mailbox
        self.failure: Failure | None = None
        self._running: Validation | None = None
        self._ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="polytrain-validation")
        if config is None:
            self._warn_of_pending()
        elif config.on_failure == "fail":
            # Failed validations have ended the run: retry them when it is resumed.
            self._validations.retry_failed()

    def __enter__(self) -> ValidationCoordinator:
        return self

    def __exit__(self, *_: object) -> None:
        if self.validator is not None:
            self.validator.cancel()
        self._thread.shutdown()
        if self.validator is not None:
            self.validator.close()

    @property
    def is_busy(self) -> bool:
        """Whether a committed checkpoint is being validated, or waits for that."""
        return self._running is not None or self._due() is not None

    @property
    def pending(self) -> int:
        """Number of committed checkpoints that are being validated or wait for that."""
        waiting = {validation.checkpoint for validation in self._validations.pending}
        return sum(each.directory in waiting for each in self._manager.checkpoints)

    def request(self, manifest: Manifest) -> None:
        """Note a checkpoint's request for a validation, before it is committed."""
        task = self._manager.validation_of(manifest.directory)
        if self._validates_all and not manifest.is_rescue:
            task = {}
        if task is None or self._config is None:
            return
        validation = Validation(checkpoint=manifest.directory, step=manifest.step, task=task)
        if self._validations.request(validation):
            self._journal.write(
                ValidationRequested(
                    checkpoint=validation.checkpoint, step=validation.step, task=validation.task
                )
            )

    def take(self) -> list[Validation]:
        """Return the validations that have ended, and start the next one."""
        ended = []
        while not self._ended.empty():
            validation, outcome = self._ended.get()
            self._running = None
            # A restart may have undone its checkpoint meanwhile.
            if outcome is not None and self._validations.of(validation.checkpoint) is not None:
                ended.append(self._end(validation, outcome))
        self._start_next()
        return ended

    @property
    def all_failed(self) -> str:
        """The reason that no checkpoint has a score if every validation failed; else empty."""
        return self._validations.failure

    def warn_if_unused(self) -> None:
        """Warn if there is a validation function, but no checkpoint was validated."""
        if self._config is not None and not len(self._validations):
            logger.warning(
                "validation_config was passed, and no checkpoint was validated: in the training "
                "function, call report(metrics, checkpoint=…, validation=True)."
            )

    @property
    def _validations(self) -> Validations:
        return self._manager.validations

    def _due(self) -> Validation | None:
        if self.validator is None or self.failure is not None:
            return None
        return self._validations.due({each.directory for each in self._manager.checkpoints})

    def _start_next(self) -> None:
        if self._running is not None or not self._validations.pending:
            return
        validation = self._due()
        if validation is None:
            return
        assert self._config is not None, "without a function nothing is due"
        config = task_of(self._config, validation.task)
        location = self._manager.store.location_of(validation.checkpoint)
        task = ValidationTask(
            checkpoint=Checkpoint(location.address, location.filesystem),
            fn_kwargs=config.fn_kwargs,
            timeout_s=config.timeout_s,
        )
        self._running = validation
        self._thread.submit(self._validate, validation, task)

    def _validate(self, validation: Validation, task: ValidationTask) -> None:
        assert self.validator is not None
        outcome: Validated | NotValidated | None
        try:
            outcome = self.validator.validate(task)
        except Exception as error:  # any error of a cluster's client
            logger.debug("A validation can't be carried out.", exc_info=error)
            outcome = NotValidated(reason=f"{type(error).__name__}: {error}")
        self._ended.put((validation, outcome))
        self._mailbox.put((WorkEnded(),))

    def _end(self, validation: Validation, outcome: Validated | NotValidated) -> Validation:
        manifest = self._manager.committed_as(validation.checkpoint)
        if manifest is None:
            outcome = NotValidated(reason="the checkpoint is gone")
        elif isinstance(outcome, Validated):
            both = collision(outcome.metrics, manifest.metrics)
            outcome = outcome if both is None else NotValidated(reason=both)
        ended = _with_outcome(validation, outcome)
        traceback = "" if isinstance(outcome, Validated) else outcome.traceback or outcome.output
        self._validations.end(ended)
        self._journal.write(
            ValidationEnded(
                checkpoint=ended.checkpoint,
                step=ended.step,
                status=ended.status,
                metrics=ended.metrics,
                reason=ended.reason,
                traceback=traceback,
            )
        )
        if isinstance(outcome, Validated):
            logger.info("The checkpoint %s is validated: %s", ended.checkpoint, ended.metrics)
        elif manifest is not None:
            self._failed(ended, outcome)
        return ended

    def _failed(self, ended: Validation, outcome: NotValidated) -> None:
        what = f"the validation of {ended.checkpoint} (step {ended.step}) failed"
        assert self._config is not None
        if self._config.on_failure == "fail":
            # The next driver validates it again, so retention must not delete it.
            self._validations.retry_failed()
            self.failure = Failure(
                kind=FailureKind.VALIDATION,
                rank=None,
                message=f"{what}: {ended.reason}",
                traceback=outcome.traceback,
                step=ended.step,
                output=outcome.output,
                error=outcome.error,
            )
            return
        # The traceback repeats the reason after its first line.
        first_line = ended.reason.partition("\n")[0]
        details = f"{first_line}\n{outcome.traceback or outcome.output}"
        logger.warning("%s: %s", what.capitalize(), details.strip())

    def _warn_of_pending(self) -> None:
        """Without a function, requests of earlier drivers are left to later ones."""
        left = self.pending
        if left:
            logger.warning(
                "%s for a validation, and fit() has no function for it: pass "
                "validation_config=ValidationConfig(fn).",
                "1 checkpoint of this run waits" if left == 1 else f"{left} checkpoints wait",
            )


def _with_outcome(validation: Validation, outcome: Validated | NotValidated) -> Validation:
    if isinstance(outcome, Validated):
        return replace(validation, status=ValidationStatus.VALIDATED, metrics=outcome.metrics)
    status = ValidationStatus.TIMED_OUT if outcome.timed_out else ValidationStatus.FAILED
    return replace(validation, status=status, reason=outcome.reason)


def opened(
    run: Run, group: WorkerGroup, journal: Journal, mailbox: Mailbox
) -> ValidationCoordinator:
    """Return the coordinator of a run's validations. No process starts before the first one.

    Args:
        group: its workers.
        mailbox: the driver's mailbox, also for the output of the validation function.
    """
    coordinator = ValidationCoordinator(
        config=run.spec.validation_config,
        validates_all=run.spec.train_loop_per_worker is None,
        manager=run.manager,
        journal=journal,
        mailbox=mailbox,
    )
    if run.spec.validation_config is not None:
        coordinator.validator = opened_validator(
            run.spec.validation_config,
            group=group,
            demand=run.demand,
            threads=run.spec.scaling_config.cpus_per_worker,
            is_local=run.choice is None or run.choice.is_local,
            path=run.import_path,
            runtime_env=run.spec.run_config.worker_runtime_env,
            tell=lambda output: mailbox.put((output,)),
        )
    return coordinator


def opened_validator(
    config: ValidationConfig,
    *,
    group: WorkerGroup,
    demand: Demand,
    threads: int,
    is_local: bool,
    path: tuple[str, ...],
    runtime_env: Mapping[str, Any] | None,
    tell: Callable[[Output], None],
) -> Validator:
    """Return the validator that calls the function. No process starts before the first call.

    Args:
        config: the user's configuration.
        group: the run's workers, whose zygote forks the processes on this machine.
        demand: the backend's demand.
        threads: number of threads of a worker.
        is_local: whether the run doesn't use Ray.
        path: the driver's `sys.path`.
        runtime_env: `RunConfig.worker_runtime_env`.
        tell: called from any thread with the function's output; on Ray, Ray shows that.
    """
    code = code_in(config.fn)
    if not is_local:
        from polytrain.validation.ray_validator import RayValidator

        options = dict(config.ray_remote_kwargs)
        merged = runtime_env_of_validations(runtime_env, options.pop("runtime_env", None))
        options |= {"runtime_env": merged} if merged else {}
        return RayValidator(*pickled_for_ray(*code, value=config.fn), options)
    if isinstance(group, AgentGroup):
        zygote = group.zygote
    else:
        name = zygote_name(secrets.token_hex(8), socket.gethostname())
        zygote = zygote_for(demand, name=name, threads=threads, with_data=False, path=path)
        zygote = replace(zygote, variables=variables_of(runtime_env))
    return LocalValidator(
        pickled_with(*code, value=config.fn),
        zygote,
        environment={**zygote.environment, **os.environ},
        directory=os.getcwd(),
        threads=max(1, int(config.ray_remote_kwargs.get("num_cpus") or threads)),
        tell=tell,
    )


def collision(returned: Mapping[str, Any], reported: Mapping[str, Any]) -> str | None:
    """Return why a validation's metrics can't be added to the report's; None if they can."""
    taken = {*reported, *flat(reported)}
    both = [name for name in {**returned, **flat(returned)} if name in taken]
    if not both:
        return None
    names = ", ".join(map(repr, both))
    return (
        f"it returned {names}, which the report of the checkpoint has already. Return other names, "
        f"such as {'val_' + both[0]!r}"
    )
