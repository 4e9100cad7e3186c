"""A request for a run: the same from `Trainer` to its worker processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from polytrain.config.configs import DataConfig, FailureConfig, RunConfig, ScalingConfig
from polytrain.config.loop_config import accepts
from polytrain.config.validation_config import ValidationConfig
from polytrain_plugins import Backend, CheckpointKind


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """The arguments of `Trainer`, with defaults for those that were left out.

    Until they are checked, values may be of any type.
    """

    backend: Backend
    train_loop_per_worker: Callable[..., Any] | None = None
    """The training function, or a program of the backend's; None if the backend trains."""

    train_loop_config: Any = None
    """What the training function is called with: a dict, or an object with fields; None if it is
    called without arguments."""

    datasets: Any = field(default_factory=dict)
    """The data by name, as the user passed them."""

    dataset_config: Any = field(default_factory=dict)
    """`DataConfig`s by the data sets' names."""

    scaling_config: ScalingConfig = field(default_factory=ScalingConfig)
    run_config: RunConfig = field(default_factory=RunConfig)
    restore_from: Any = None
    """A `Checkpoint`, or its directory."""

    validation_config: ValidationConfig | None = None
    repeats: int | None = None
    """If it repeats a stretch of another run, the number of workers for which that run has divided
    its data; else None. What observes and validates that run has nothing to do with it."""

    def __post_init__(self) -> None:
        config, datasets = self.dataset_config, self.datasets
        if isinstance(config, DataConfig) and isinstance(datasets, Mapping):
            object.__setattr__(self, "dataset_config", dict.fromkeys(datasets, config))
        if self.train_loop_config is None and _needs_config(self.train_loop_per_worker):
            object.__setattr__(self, "train_loop_config", {})

    @classmethod
    def of(cls, backend: Backend, **arguments: Any) -> RunSpec:
        """The request of these arguments; None stands for the default."""
        given = {name: value for name, value in arguments.items() if value is not None}
        return cls(backend=backend, **given)

    def with_program(self) -> RunSpec:
        """The request with what the backend's options name in place of a training function.

        A program is restarted after every failure. One that reports nothing has no steps, by which
        an error that comes again can be distinguished from one that passes.
        """
        failures = self.run_config.failure_config
        program = self.backend.program(max_failures=failures.max_failures)
        if program is None:
            return self
        if failures.retry_user_errors == "unless_repeated":
            failures = replace(failures, retry_user_errors=True)
        config = replace(self.run_config, failure_config=failures)
        return replace(self, train_loop_per_worker=program, run_config=config)

    def for_workers(self) -> RunSpec:
        """The request with only what worker processes read of it."""
        config, failures = self.run_config, self.run_config.failure_config
        return RunSpec(
            backend=self.backend,
            train_loop_per_worker=self.train_loop_per_worker,
            train_loop_config=self.train_loop_config,
            scaling_config=ScalingConfig(virtual_workers=self.scaling_config.virtual_workers),
            repeats=self.repeats,
            run_config=RunConfig(
                checkpoint_config=config.checkpoint_config,
                failure_config=FailureConfig(
                    on_divergence=failures.on_divergence, divergence=failures.divergence
                ),
                stop=config.stop,
                time_budget_s=config.time_budget_s,
                digests=config.digests,
                storage_timeout_s=config.storage_timeout_s,
            ),
        )

    @property
    def is_inline(self) -> bool:
        """Whether training runs in the driver's own process."""
        return self.scaling_config.num_workers == 0

    @property
    def world_size(self) -> int:
        """The most ranks; 1 for an inline run."""
        return max(1, self.scaling_config.max_workers)

    @property
    def checkpoint_kind(self) -> CheckpointKind:
        """Which ranks write checkpoints."""
        chosen = self.run_config.checkpoint_config.written_by
        return self.backend.capabilities.checkpoint if chosen is None else CheckpointKind(chosen)

    @property
    def merges_files(self) -> bool:
        """Whether files that other ranks report are added to rank 0's checkpoint."""
        is_undecided = self.run_config.checkpoint_config.written_by is None
        has_function = self.train_loop_per_worker is not None
        return is_undecided and has_function and self.checkpoint_kind is CheckpointKind.ONE_RANK

    @property
    def saves_by_itself(self) -> bool:
        """Whether checkpoints are made without a training function's reports."""
        if self.train_loop_per_worker is not None:
            return False
        # If rank 0 writes checkpoints, declarative training also makes one on request.
        every = self.run_config.checkpoint_config.checkpoint_frequency
        return every > 0 or self.checkpoint_kind is CheckpointKind.ONE_RANK


def _needs_config(function: Any) -> bool:
    """Whether a training function is called with an empty config where none is given."""
    return callable(function) and not accepts(function) and accepts(function, {})
