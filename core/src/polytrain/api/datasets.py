"""The data sets of a job. Arrow, numpy and the readers of all sources are imported with the first.

Each function returns at once if there are no data sets, and only otherwise imports what reads them:
that takes most of the time that the whole of polytrain takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from polytrain.config.configs import ScalingConfig
from polytrain.config.run_spec import RunSpec
from polytrain_plugins import Backend, Demand, Problem

if TYPE_CHECKING:
    from polytrain.data.shards.assignment import RunDataset
    from polytrain.run.run import Run


def described_datasets(spec: RunSpec) -> tuple[tuple[RunDataset, ...], tuple[Problem, ...]]:
    """Describe the data sets; see `data.checks.described`."""
    backend: Backend | None = spec.backend
    needs_train = (
        spec.train_loop_per_worker is None
        and backend is not None
        and backend.capabilities.declarative
    )
    if _is_empty(spec.datasets) and _is_empty(spec.dataset_config) and not needs_train:
        return (), ()
    from polytrain.data.checks import described

    return described(
        spec.datasets,
        spec.dataset_config,
        needs_train=needs_train,
        num_workers=spec.world_size,
    )


def grouped_datasets(
    datasets: tuple[RunDataset, ...], demand: Demand, *, num_workers: int, is_table: bool
) -> tuple[tuple[RunDataset, ...], tuple[Problem, ...]]:
    """Find where groups begin, and rows without a value that they need; see `data.checks`."""
    if not datasets:
        return (), ()
    from polytrain.data.checks import grouped, incomplete

    datasets, problems = grouped(datasets, demand, num_workers=num_workers, is_table=is_table)
    return datasets, (*problems, *incomplete(datasets, demand.complete))


def identified_datasets(datasets: tuple[RunDataset, ...]) -> tuple[RunDataset, ...]:
    """Return the data sets with the digests that they have now."""
    if not datasets:
        return ()
    from polytrain.data.fingerprint import digests

    return tuple(replace(dataset, digests=digests(dataset.source)) for dataset in datasets)


def facts_of(datasets: tuple[RunDataset, ...]) -> dict[str, dict[str, str]]:
    """Return what a run's record has of the rows of each data set, by name."""
    if not datasets:
        return {}
    from polytrain.data.fingerprint import facts

    return {dataset.name: facts(dataset.source, dataset.digests) for dataset in datasets}


def ready_datasets(
    datasets: tuple[RunDataset, ...], demand: Demand, scaling: ScalingConfig
) -> tuple[tuple[RunDataset, ...], tuple[Problem, ...]]:
    """Run the pipelines that must end before training begins; see `data.checks.ready`."""
    if not datasets:
        return (), ()
    from polytrain.data.checks import ready

    return ready(datasets, demand, scaling)


def start_problems(run: Run) -> tuple[Problem, ...]:
    """Why a run can't start at its checkpoint's positions in the data.

    If it can, this warns where workers read many times the rows that they use.
    """
    if not run.datasets:
        return ()
    from polytrain.data.checks import (
        position_problems,
        skip_problems,
        warn_of_read_amplification,
    )

    own = run.start.own
    field = f"datasets, for the run in {run.location.address}" if own else "restore_from"
    problems = tuple(position_problems(run.shard_specs, run.start.positions, field=field))
    if run.spec.run_config.failure_config.skips_bad_batches:
        problems += tuple(skip_problems(run.shard_specs))
    if not problems:
        warn_of_read_amplification(run.shard_specs, run.spec.world_size)
    return problems


def _is_empty(given: Any) -> bool:
    # The truth value of a frame or an array, given by mistake, is an error.
    return isinstance(given, Mapping) and not given
