"""Opens the validator of a run's checkpoints: on this machine, or on Ray."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from polytrain.config.runtime_env import runtime_env_of_validations, variables_of
from polytrain.config.validation_config import ValidationConfig
from polytrain.events.output import Output
from polytrain.functions.pickling import code_in, pickled_for_ray, pickled_with
from polytrain.record.journal import Journal
from polytrain.run.run import Run
from polytrain.validation.coordinator import ValidationCoordinator
from polytrain.validation.local_validator import LocalValidator, ValidationProcessSpec
from polytrain.validation.validator import Validator
from polytrain.workers.agents.agent_spec import zygote_for
from polytrain.workers.driver.agent_group import AgentGroup
from polytrain.workers.driver.group import WorkerGroup
from polytrain.workers.processes.client import zygote_name
from polytrain_plugins import Demand


def opened(
    run: Run, group: WorkerGroup, journal: Journal, show: Callable[[Output], None]
) -> ValidationCoordinator:
    """Return the coordinator of a run's validations. No process starts before the first one.

    Args:
        run: the run.
        group: its workers.
        journal: its journal.
        show: shows the output of the validation function.
    """
    coordinator = ValidationCoordinator(
        config=run.spec.validation_config,
        manager=run.manager,
        journal=journal,
        wake=group.wake,
        show=show,
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
            tell=coordinator.tell,
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
    spec = ValidationProcessSpec(
        zygote=zygote,
        environment={**zygote.environment, **os.environ},
        directory=os.getcwd(),
        threads=max(1, int(config.ray_remote_kwargs.get("num_cpus") or threads)),
    )
    return LocalValidator(spec, pickled_with(*code, value=config.fn), tell=tell)
