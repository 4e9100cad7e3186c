"""Values of a run's configurations that clash with each other."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from polytrain.config.configs import RunConfig, ScalingConfig
from polytrain.config.constraints import typed_problems
from polytrain.config.runtime_env import runtime_env_problems
from polytrain_plugins import Problem


def config_problems(scaling: Any, run: Any) -> Iterator[Problem]:
    """Yield what is wrong with the configuration, whatever the data and the cluster are."""
    of_fields = [
        *typed_problems("scaling_config", scaling, ScalingConfig),
        *typed_problems("run_config", run, RunConfig),
    ]
    yield from of_fields
    if isinstance(scaling, ScalingConfig):
        wrong = {problem.field.removeprefix("ScalingConfig.") for problem in of_fields}
        for problem in _clashes(scaling, wrong):
            # One problem of a value is enough.
            if problem.field.removeprefix("ScalingConfig.") not in wrong:
                yield problem
    if isinstance(scaling, ScalingConfig) and isinstance(run, RunConfig):
        if getattr(run.failure_config, "stragglers", "") == "replace" and scaling.standby == 0:
            yield Problem(
                field="FailureConfig.stragglers",
                what="'replace' moves a straggler to a standby, and there is no standby",
                remedy="Set ScalingConfig(standby=1), or use 'report'",
            )
        if isinstance(run.worker_runtime_env, Mapping):
            is_inline = scaling.num_workers == 0
            yield from runtime_env_problems(run.worker_runtime_env, is_inline=is_inline)


def _clashes(scaling: ScalingConfig, wrong: set[str]) -> Iterator[Problem]:
    """Yield the clashes between values.

    Args:
        scaling: the user's.
        wrong: fields whose value is wrong by itself.
    """
    count = scaling.num_workers
    if count == 0:
        yield from _inline_problems(scaling, wrong)
    elif not sys.platform.startswith("linux"):
        yield Problem(
            field="ScalingConfig.num_workers",
            what=f"worker processes need Linux, this is {sys.platform}",
            remedy="Use num_workers=0 here",
        )
    if not wrong & {"num_workers", "placement_strategy"} and isinstance(count, tuple):
        strategy = scaling.placement_strategy
        if strategy.startswith("STRICT_"):
            yield Problem(
                field="ScalingConfig.placement_strategy",
                what=f"{strategy} needs a fixed number of workers, not {count}",
                remedy=f"Use {strategy.removeprefix('STRICT_')!r}",
            )
    if not wrong & {"resources_per_worker", "accelerator_type", "use_gpu"}:
        yield from _resource_problems(scaling)
    if not wrong & {"label_selector", "num_workers"} and count != 0:
        yield from _label_problems(scaling)


def _inline_problems(scaling: ScalingConfig, wrong: set[str]) -> Iterator[Problem]:
    if scaling.use_gpu:
        yield Problem(
            field="ScalingConfig.use_gpu",
            what="num_workers=0 trains in this process, which polytrain gives no GPU",
            remedy="Use num_workers=1",
        )
    if scaling.standby:
        yield Problem(
            field="ScalingConfig.standby",
            what="num_workers=0 trains in this process, which no standby can replace",
            remedy="Use num_workers=1",
        )
    labels = None if "label_selector" in wrong else scaling.label_selector
    if labels and (isinstance(labels, Mapping) or any(labels)):
        yield Problem(
            field="ScalingConfig.label_selector",
            what="num_workers=0 trains in this process, wherever it is",
            remedy="Use num_workers=1, or leave it out",
        )


def _resource_problems(scaling: ScalingConfig) -> Iterator[Problem]:
    given = scaling.resources_per_worker or {}
    if scaling.use_gpu and given.get("GPU") == 0:
        yield Problem(
            field="ScalingConfig.use_gpu",
            what="it is True, and resources_per_worker gives a worker no GPU",
            remedy="Leave 'GPU' out of resources_per_worker, or use use_gpu=False",
        )
    if not any(scaling.resources.values()):
        yield Problem(
            field="ScalingConfig.resources_per_worker",
            what=f"{dict(given)} gives a worker no resources",
            remedy='Give at least one, for example {"CPU": 1}',
        )


def _label_problems(scaling: ScalingConfig) -> Iterator[Problem]:
    field, selectors = "ScalingConfig.label_selector", scaling.label_selector
    if selectors is None or isinstance(selectors, Mapping):
        return
    if not isinstance(scaling.num_workers, int) or scaling.standby:
        yield Problem(
            field=field,
            what="a list has a selector for each worker, and the workers of an elastic run and "
            "standbys replace each other",
            remedy="Give one dict for all workers, or a fixed num_workers without standbys",
        )
    elif len(selectors) != scaling.num_workers:
        yield Problem(
            field=field,
            what=f"it has {len(selectors)} selectors for {scaling.num_workers} workers",
            remedy="Give one for each worker, or one dict for all of them",
        )
