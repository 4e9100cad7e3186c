"""The frameworks' configurations with Ray Train's names: each is the options of a backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from polytrain.config.constraints import field_problems
from polytrain_plugins import InvalidJobError


class FrameworkConfig:
    """The options of a backend, under Ray Train's names."""

    __slots__ = ()

    backend_name: ClassVar[str]
    """The backend's name, as for `make_trainer`."""

    def __post_init__(self) -> None:
        problems = tuple(field_problems(self))
        if problems:
            raise InvalidJobError(problems)

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
