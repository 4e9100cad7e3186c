"""Trainers with the signatures of Ray Train's: each is a `Trainer` of one backend."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from polytrain.api.trainer import Trainer
from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.config.configs import DataConfig, RunConfig, ScalingConfig
from polytrain.config.constraints import wrong_type
from polytrain.config.validation_config import ValidationConfig
from polytrain.lazy_names import RayTrainClass
from polytrain.ray_names.configs import (
    FrameworkConfig,
    LightGBMConfig,
    TensorflowConfig,
    TorchConfig,
    XGBoostConfig,
)
from polytrain_plugins import InvalidJobError, Problem, load_backend


class DataParallelTrainer(Trainer, metaclass=RayTrainClass):
    """Trains with a training function, with the arguments of Ray Train's trainer of this name.

    Args:
        train_loop_per_worker: the training function; every worker calls it.
        train_loop_config: what it is called with.
        backend_config: such as `TorchConfig()`, which chooses the framework. Without it the
            function runs on every worker, without a collective of its own.
        scaling_config: how many workers, and the resources of each.
        run_config: name, storage, failures, checkpoints, observers.
        datasets: data by name, or functions without arguments that return them.
        dataset_config: for all data sets, or by name for each.
        resume_from_checkpoint: the checkpoint from which a new run starts; see
            `Trainer(restore_from=…)`.
        metadata: leave it out; `train_loop_config` reaches the training function.
        validation_config: the function that validates checkpoints while training continues.

    Raises:
        InvalidJobError: if anything is wrong with the arguments; it lists every problem.
        UnknownBackendError: if the framework's plugin isn't installed.
    """

    _theirs: ClassVar[str] = "DataParallelTrainer"

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any] | None = None,
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        backend_config: FrameworkConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | Mapping[str, DataConfig] | None = None,
        resume_from_checkpoint: Checkpoint | str | Path | None = None,
        metadata: Mapping[str, Any] | None = None,
        validation_config: ValidationConfig | None = None,
        _options: Mapping[str, Any] | None = None,
    ) -> None:
        problems = tuple(_refused(metadata=metadata))
        given: Any = backend_config
        if given is not None and not isinstance(given, FrameworkConfig):
            problems += (wrong_type("backend_config", given, FrameworkConfig),)
            given = None
        if problems:
            raise InvalidJobError(problems)
        # The reference backend adds nothing to a training function.
        name = "reference" if given is None else given.backend_name
        options = {} if given is None else given.options()
        super().__init__(
            load_backend(name)(**options, **(_options or {})),
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            datasets=_made(datasets),
            dataset_config=dataset_config,
            scaling_config=scaling_config,
            run_config=run_config,
            restore_from=resume_from_checkpoint,
            validation_config=validation_config,
        )


class TorchTrainer(DataParallelTrainer):
    """Trains a PyTorch model in a training function.

    Args:
        torch_config: its options.

    The other arguments are those of `DataParallelTrainer`.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        torch_config: TorchConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | Mapping[str, DataConfig] | None = None,
        validation_config: ValidationConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | str | Path | None = None,
    ) -> None:
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=torch_config or TorchConfig(),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            validation_config=validation_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
        )


class XGBoostTrainer(DataParallelTrainer):
    """Trains trees by XGBoost, in a training function or from `params` alone.

    Args:
        xgboost_config: its options.
        label_column: without a training function, the column to predict.
        params: without one, the parameters of the framework's `train`.
        num_boost_round: without one, the number of rounds.

    The other arguments are those of `DataParallelTrainer`.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any] | None = None,
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        xgboost_config: XGBoostConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | Mapping[str, DataConfig] | None = None,
        validation_config: ValidationConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | str | Path | None = None,
        label_column: str | None = None,
        params: Mapping[str, Any] | None = None,
        num_boost_round: int | None = None,
    ) -> None:
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=xgboost_config or XGBoostConfig(),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            validation_config=validation_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
            _options=_boosting(label=label_column, params=params, num_boost_round=num_boost_round),
        )


class LightGBMTrainer(DataParallelTrainer):
    """Trains trees by LightGBM, in a training function or from `params` alone.

    Args:
        lightgbm_config: its options.
        label_column: without a training function, the column to predict.
        params: without one, the parameters of the framework's `train`.
        num_boost_round: without one, the number of rounds.

    The other arguments are those of `DataParallelTrainer`.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any] | None = None,
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        lightgbm_config: LightGBMConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | Mapping[str, DataConfig] | None = None,
        validation_config: ValidationConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | str | Path | None = None,
        label_column: str | None = None,
        params: Mapping[str, Any] | None = None,
        num_boost_round: int | None = None,
    ) -> None:
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=lightgbm_config or LightGBMConfig(),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            validation_config=validation_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
            _options=_boosting(label=label_column, params=params, num_boost_round=num_boost_round),
        )


class TensorflowTrainer(DataParallelTrainer):
    """Trains a TensorFlow model in a training function.

    Args:
        tensorflow_config: its options.

    The other arguments are those of `DataParallelTrainer`.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        tensorflow_config: TensorflowConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | Mapping[str, DataConfig] | None = None,
        validation_config: ValidationConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | str | Path | None = None,
    ) -> None:
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=tensorflow_config or TensorflowConfig(),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            validation_config=validation_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
        )


def _boosting(**options: Any) -> dict[str, Any]:
    """The backend's options, without those that the user hasn't given."""
    return {name: value for name, value in options.items() if value is not None}


def _refused(*, metadata: Any) -> Iterator[Problem]:
    if metadata is not None:
        yield Problem(
            field="metadata",
            what="a run stores none",
            remedy="Pass it in train_loop_config, which the training function gets",
        )


def _made(datasets: Any) -> Any:
    """The data sets, with those made that were passed as functions."""
    if not isinstance(datasets, Mapping):
        return datasets
    return {name: data() if _is_function(data) else data for name, data in datasets.items()}


def _is_function(data: Any) -> bool:
    # Data sets of other libraries may be callable too.
    return inspect.isroutine(data) or isinstance(data, partial)
