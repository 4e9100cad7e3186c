"""What is wrong with a run's configuration, beyond single fields: types, and values that clash."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polytrain.config.configs import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from polytrain.config.constraints import field_problems, wrong_type
from polytrain.config.runtime_env import runtime_env_problems
from polytrain.text.plain_values import is_whole
from polytrain_plugins import Problem

_NAME_BYTES = 255
"""Length of a file's name that every usual file system takes."""

_SHOWN = 80
"""Characters of a wrong value that tell the user which one it is."""

_RAYS = ("CPU", "GPU", "TPU", "HPU", "NPU", "neuron_cores", "memory")
"""Resources that Ray has by itself; others have the names that the cluster's owner gives them."""

_FOLDED = {name.casefold().replace("_", "").rstrip("s"): name for name in _RAYS}


def config_problems(scaling: Any, run: Any) -> Iterator[Problem]:
    """Yield what is wrong with the configuration, whatever the data and the cluster are."""
    if not isinstance(scaling, ScalingConfig):
        yield wrong_type("scaling_config", scaling, ScalingConfig)
    else:
        yield from _scaling_problems(scaling)
    if not isinstance(run, RunConfig):
        yield wrong_type("run_config", run, RunConfig)
    else:
        yield from _run_problems(run)
    if isinstance(scaling, ScalingConfig) and isinstance(run, RunConfig):
        yield from _straggler_problems(scaling, run.failure_config)
        yield from runtime_env_problems(run.worker_runtime_env, is_inline=scaling.num_workers == 0)


def _scaling_problems(scaling: ScalingConfig) -> Iterator[Problem]:
    # What a user passes may be anything, whatever the annotation says.
    count: Any = scaling.num_workers
    yield from _number_problems(count)
    yield from _resource_problems(scaling)
    yield from field_problems(scaling)
    accelerator: Any = scaling.accelerator_type
    if not isinstance(accelerator, str | None):
        yield wrong_type("ScalingConfig.accelerator_type", accelerator, str)
    yield from _label_problems(scaling)
    if count == 0 and scaling.use_gpu:
        yield Problem(
            field="ScalingConfig.use_gpu",
            what="num_workers=0 trains in this process, which polytrain gives no GPU",
            remedy="Use num_workers=1",
        )
    resources: Any = scaling.resources_per_worker
    if scaling.use_gpu is True and isinstance(resources, Mapping) and resources.get("GPU") == 0:
        yield Problem(
            field="ScalingConfig.use_gpu",
            what="it is True, and resources_per_worker gives a worker no GPU",
            remedy="Leave 'GPU' out of resources_per_worker, or use use_gpu=False",
        )
    if count == 0 and scaling.standby:
        yield Problem(
            field="ScalingConfig.standby",
            what="num_workers=0 trains in this process, which no standby can replace",
            remedy="Use num_workers=1",
        )
    if isinstance(count, tuple) and scaling.placement_strategy.startswith("STRICT_"):
        yield Problem(
            field="ScalingConfig.placement_strategy",
            what=f"{scaling.placement_strategy} needs a fixed number of workers, not {count}",
            remedy=f"Use {scaling.placement_strategy.removeprefix('STRICT_')!r}",
        )
    if count != 0 and not sys.platform.startswith("linux"):
        yield Problem(
            field="ScalingConfig.num_workers",
            what=f"worker processes need Linux, this is {sys.platform}",
            remedy="Use num_workers=0 here",
        )


def _label_problems(scaling: ScalingConfig) -> Iterator[Problem]:
    field = "ScalingConfig.label_selector"
    given: Any = scaling.label_selector
    if given is None:
        return
    selectors = [given] if isinstance(given, Mapping) else given
    if not isinstance(selectors, list | tuple):
        yield wrong_type(field, given, dict)
        return
    for selector in selectors:
        if not isinstance(selector, Mapping) or not all(
            isinstance(text, str) and text for pair in selector.items() for text in pair
        ):
            yield Problem(
                field=field,
                what=f"{selector!r} doesn't map names of labels to values, as strings",
                remedy='Give a dict, for example {"ray.io/market-type": "spot"}',
            )
    if scaling.num_workers == 0 and any(selectors):
        yield Problem(
            field=field,
            what="num_workers=0 trains in this process, wherever it is",
            remedy="Use num_workers=1, or leave it out",
        )
    elif not isinstance(given, Mapping):
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


def _number_problems(count: Any) -> Iterator[Problem]:
    field = "ScalingConfig.num_workers"
    if isinstance(count, tuple | list):
        least, most = count if len(count) == 2 else (0, 0)
        if (
            isinstance(count, list)
            or not (is_whole(least) and is_whole(most))
            or not 1 <= least <= most
        ):
            yield Problem(
                field=field,
                what=f"{count!r} is not a pair of the least and the most workers",
                remedy="Give two numbers, the smaller first, for example (2, 8)",
            )
    elif not is_whole(count) or count < 0:
        yield Problem(
            field=field,
            what=f"{count!r} is not a number of workers",
            remedy="Give a whole number: 1 or more, or 0 to train in this process; or the least "
            "and the most, for example (2, 8)",
        )


def _resource_problems(scaling: ScalingConfig) -> Iterator[Problem]:
    field = "ScalingConfig.resources_per_worker"
    resources: Any = scaling.resources_per_worker
    if resources is None:
        return
    if not isinstance(resources, Mapping):
        yield wrong_type(field, resources, dict)
        return
    wrong = {k: v for k, v in resources.items() if not isinstance(v, int | float) or v < 0}
    for name, amount in wrong.items():
        yield Problem(
            field=field,
            what=f"{amount!r} is not an amount of {name!r}",
            remedy='Give a number, 0 or more, for example {"CPU": 2}',
        )
    for name in resources:
        meant = _FOLDED.get(str(name).casefold().replace("_", "").rstrip("s"))
        if meant is not None and name != meant:
            yield Problem(
                field=field,
                what=f"Ray has no resource {name!r}",
                remedy=f"Write {meant!r}",
            )
    if not wrong and not any(scaling.resources.values()):
        yield Problem(
            field=field,
            what=f"{dict(resources)} gives a worker no resources",
            remedy='Give at least one, for example {"CPU": 1}',
        )


def _run_problems(run: RunConfig) -> Iterator[Problem]:
    if run.name is not None:
        yield from _name_problems(run.name)
    storage: Any = run.storage_path
    if not isinstance(storage, str | Path | None):
        yield wrong_type("RunConfig.storage_path", storage, str)
    yield from field_problems(run)
    failure: Any = run.failure_config
    if not isinstance(failure, FailureConfig):
        yield wrong_type("RunConfig.failure_config", failure, FailureConfig)
    else:
        yield from field_problems(failure)
    checkpoint: Any = run.checkpoint_config
    if not isinstance(checkpoint, CheckpointConfig):
        yield wrong_type("RunConfig.checkpoint_config", checkpoint, CheckpointConfig)
    else:
        yield from field_problems(checkpoint)
        score: Any = checkpoint.checkpoint_score_attribute
        if not isinstance(score, str | None) or score == "":
            yield Problem(
                field="CheckpointConfig.checkpoint_score_attribute",
                what=f"{score!r} is not the name of a metric",
                remedy='Give the name of a reported metric, for example "loss", or None',
            )


def _name_problems(name: Any) -> Iterator[Problem]:
    remedy = None
    if not isinstance(name, str) or name in ("", ".", ".."):
        remedy = 'Give a name, for example "baseline"'
    elif name != Path(name).name:
        remedy = "Give a name without slashes"
    elif not name.isprintable():
        remedy = "Give a name without control characters"
    elif len(os.fsencode(name)) > _NAME_BYTES:
        remedy = f"Give a name of at most {_NAME_BYTES} bytes"
    if remedy is not None:
        yield Problem(
            field="RunConfig.name",
            what=f"{shortened(name)} can't name a directory",
            remedy=remedy,
        )


def shortened(value: Any) -> str:
    """Return how a value is written, without the middle of a long one."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}…{text[-_SHOWN // 4 :]}"


def _straggler_problems(scaling: ScalingConfig, failure: Any) -> Iterator[Problem]:
    replaces = isinstance(failure, FailureConfig) and failure.stragglers == "replace"
    if replaces and scaling.standby == 0:
        yield Problem(
            field="FailureConfig.stragglers",
            what="'replace' moves a straggler to a standby, and there is no standby",
            remedy="Set ScalingConfig(standby=1), or use 'report'",
        )
