"""Trainers with the signatures of Ray Train's, each a `Trainer` of one backend, and its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict, TypeVar, Unpack

from polytrain.api.backend_checks import raise_if_any
from polytrain.api.trainer import Trainer
from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.config.configs import DataConfig, RunConfig, ScalingConfig
from polytrain.config.constraints import field_problems, wrong_type
from polytrain.config.validation_config import ValidationConfig
from polytrain.lazy_names import RayTrainClass
from polytrain_plugins import InvalidJobError, Problem, load_backend
from polytrain_plugins.close_names import did_you_mean

if TYPE_CHECKING:
    from polytrain import Result, RunHandle


class FrameworkConfig:
    """The options of a backend, under Ray Train's names."""

    __slots__ = ()

    backend_name: ClassVar[str]
    """The backend's name, as for `make_trainer`."""

    def __post_init__(self) -> None:
        raise_if_any(field_problems(self))

    def options(self) -> Mapping[str, Any]:
        """The backend's options."""
        return {}


@dataclass(frozen=True, slots=True)
class TorchConfig(FrameworkConfig):
    """The process group of `TorchTrainer`."""

    backend_name: ClassVar[str] = "torch"

    backend: str | None = None
    """"nccl", "gloo" or any other that torch knows; by default nccl with GPUs, else gloo."""

    init_method: Literal["env", "tcp"] = "env"
    """Both mean the same here: rank 0 serves a store, on a port that the system chooses."""

    timeout_s: float = 1800
    """Seconds after which a collective operation fails if a peer doesn't join it."""

    def options(self) -> Mapping[str, Any]:
        return {"process_group": self.backend, "timeout_s": self.timeout_s}


@dataclass(frozen=True, slots=True)
class XGBoostConfig(FrameworkConfig):
    """The collective of `XGBoostTrainer`."""

    backend_name: ClassVar[str] = "xgboost"

    xgboost_communicator: Literal["rabit"] = "rabit"


@dataclass(frozen=True, slots=True)
class LightGBMConfig(FrameworkConfig):
    """The network of `LightGBMTrainer`; it has no options."""

    backend_name: ClassVar[str] = "lightgbm"


@dataclass(frozen=True, slots=True)
class TensorflowConfig(FrameworkConfig):
    """The strategy of `TensorflowTrainer`; it has no options."""

    backend_name: ClassVar[str] = "tensorflow"


Init = TypeVar("Init", bound=Callable[..., None])


class RayTrainArguments(TypedDict, total=False):
    """The arguments that all trainers of Ray Train take by name; each is None by default."""

    train_loop_config: Any
    scaling_config: ScalingConfig | None
    run_config: RunConfig | None
    datasets: Mapping[str, Any] | None
    dataset_config: DataConfig | Mapping[str, DataConfig] | None
    validation_config: ValidationConfig | None
    metadata: Mapping[str, Any] | None
    resume_from_checkpoint: Checkpoint | str | Path | None


class BoosterArguments(RayTrainArguments, total=False):
    """The arguments of a trainer of boosters."""

    label_column: str | None
    params: Mapping[str, Any] | None
    num_boost_round: int | None


_OPTIONS = {"label_column": "label", "params": "params", "num_boost_round": "num_boost_round"}
"""A booster's argument → the backend's option."""

_NAMES = {
    "label": "label_column",
    "process_group": "TorchConfig.backend",
    "restore_from": "resume_from_checkpoint",
    "timeout_s": "TorchConfig.timeout_s",
}
"""What a `Trainer` calls an argument → what it is called here."""


@contextmanager
def _ray_trains_names() -> Iterator[None]:
    """Name what a `Trainer` refuses as it is called here."""
    try:
        yield
    except InvalidJobError as error:
        named = [replace(each, field=_NAMES.get(each.field, each.field)) for each in error.problems]
        raise InvalidJobError(tuple(named)) from error.__cause__


def _spells_out(arguments: Any) -> Callable[[Init], Init]:
    """Give an `__init__` the signature with each of its `**arguments` by name.

    Args:
        arguments: the `TypedDict` of them.
    """

    def decorate(init: Init) -> Init:
        signature = inspect.signature(init)
        *own, _ = signature.parameters.values()
        by_name = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint.__forward_arg__
            )
            for name, hint in arguments.__annotations__.items()
        ]
        init.__signature__ = signature.replace(parameters=[*own, *by_name])  # type: ignore[attr-defined]  # `inspect` reads it
        return init

    return decorate


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

    @_spells_out(RayTrainArguments)
    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any] | None = None,
        *,
        backend_config: FrameworkConfig | None = None,
        **arguments: Unpack[RayTrainArguments],
    ) -> None:
        self._init(train_loop_per_worker, backend_config, RayTrainArguments, arguments)

    def _init(
        self,
        function: Any,
        config: Any,
        known: Any,
        arguments: Mapping[str, Any],
        kind: type[FrameworkConfig] | None = None,
    ) -> None:
        """
        Args:
            known: the `TypedDict` of the arguments.
            kind: the class of `config`, if the trainer is for one framework.
        """
        for name in arguments:
            if name not in known.__annotations__:
                what = f"{type(self).__name__}.__init__() got an unexpected keyword argument"
                meant = did_you_mean(name, known.__annotations__)
                raise TypeError(f"{what} {name!r}. {meant}".rstrip(". "))
        if kind is not None and config is None:
            config = kind()
        given = dict(arguments)
        problems: list[Problem] = []
        if given.pop("metadata", None) is not None:
            remedy = "Pass it in train_loop_config, which the training function gets"
            problems.append(Problem(field="metadata", what="a run stores none", remedy=remedy))
        if config is not None and not isinstance(config, kind or FrameworkConfig):
            field = "backend_config" if kind is None else f"{kind.backend_name}_config"
            problems.append(wrong_type(field, config, kind or FrameworkConfig))
        raise_if_any(problems)
        # The reference backend adds nothing to a training function.
        backend = load_backend("reference" if config is None else config.backend_name)
        options = {} if config is None else dict(config.options())
        for name, option in _OPTIONS.items():
            value = given.pop(name, None)
            if value is not None:
                options[option] = value
        given["datasets"] = _made(given.get("datasets"))
        given["restore_from"] = given.pop("resume_from_checkpoint", None)
        with _ray_trains_names():
            Trainer.__init__(self, backend(**options), function, **given)

    def _fit(self, resume: Literal["auto", "never"], wait: bool) -> Result | RunHandle:
        with _ray_trains_names():
            return super()._fit(resume, wait)


class TorchTrainer(DataParallelTrainer):
    """Trains a PyTorch model in a training function.

    Args:
        torch_config: its options.

    The other arguments are those of `DataParallelTrainer`.
    """

    @_spells_out(RayTrainArguments)
    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        torch_config: TorchConfig | None = None,
        **arguments: Unpack[RayTrainArguments],
    ) -> None:
        self._init(train_loop_per_worker, torch_config, RayTrainArguments, arguments, TorchConfig)


class XGBoostTrainer(DataParallelTrainer):
    """Trains trees by XGBoost, in a training function or from `params` alone.

    Args:
        xgboost_config: its options.
        label_column: without a training function, the column to predict.
        params: without one, the parameters of the framework's `train`.
        num_boost_round: without one, the number of rounds.

    The other arguments are those of `DataParallelTrainer`.
    """

    @_spells_out(BoosterArguments)
    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any] | None = None,
        *,
        xgboost_config: XGBoostConfig | None = None,
        **arguments: Unpack[BoosterArguments],
    ) -> None:
        self._init(
            train_loop_per_worker, xgboost_config, BoosterArguments, arguments, XGBoostConfig
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

    @_spells_out(BoosterArguments)
    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any] | None = None,
        *,
        lightgbm_config: LightGBMConfig | None = None,
        **arguments: Unpack[BoosterArguments],
    ) -> None:
        self._init(
            train_loop_per_worker, lightgbm_config, BoosterArguments, arguments, LightGBMConfig
        )


class TensorflowTrainer(DataParallelTrainer):
    """Trains a TensorFlow model in a training function.

    Args:
        tensorflow_config: its options.

    The other arguments are those of `DataParallelTrainer`.
    """

    @_spells_out(RayTrainArguments)
    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        tensorflow_config: TensorflowConfig | None = None,
        **arguments: Unpack[RayTrainArguments],
    ) -> None:
        self._init(
            train_loop_per_worker, tensorflow_config, RayTrainArguments, arguments, TensorflowConfig
        )


def _made(datasets: Any) -> Any:
    """The data sets, with those made that were passed as functions."""
    if not isinstance(datasets, Mapping):
        return datasets
    return {name: data() if _is_function(data) else data for name, data in datasets.items()}


def _is_function(data: Any) -> bool:
    # Data sets of other libraries may be callable too.
    return inspect.isroutine(data) or isinstance(data, partial)
