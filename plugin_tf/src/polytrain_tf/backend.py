"""The driver half: TensorFlow takes a training function, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from polytrain_plugins import Backend, Capabilities, Demand, Device, Job, Problem

if TYPE_CHECKING:
    from polytrain_tf.engine import TensorFlowEngine


MODEL_FILE = "model.keras"


@dataclass(frozen=True, kw_only=True)
class TensorFlow(Backend):
    """A `MultiWorkerMirroredStrategy`, and a training function that uses it."""

    name: ClassVar[str] = "tensorflow"
    contract_version: ClassVar[int] = 1
    capabilities: ClassVar[Capabilities] = Capabilities(devices=frozenset({Device.CPU, Device.GPU}))
    requires: ClassVar[dict[str, str]] = {
        "tensorflow": "pip install 'polytrain[tf]', or 'polytrain[tf-cpu]' without GPUs"
    }
    changeable: ClassVar[frozenset[str]] = frozenset({"timeout_s"})

    timeout_s: float = 1800.0
    """Seconds after which a collective operation whose peers don't come gives up."""

    def problems(self, job: Job) -> Iterable[Problem]:
        if not isinstance(self.timeout_s, int | float) or self.timeout_s <= 0:
            yield Problem(
                field="timeout_s",
                what=f"{self.timeout_s!r} is not a time",
                remedy="Give seconds, more than 0",
            )

    def demand(self, job: Job) -> Demand:
        return Demand(
            # Its C++ side announces every optimisation and every cancelled collective otherwise.
            environment={"TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_VERBOSITY": "ERROR"},
            preload=("tensorflow", "keras", "polytrain_tf.engine", "polytrain_tf.keras_fit"),
        )

    def engine(self) -> TensorFlowEngine:
        from polytrain_tf.engine import TensorFlowEngine

        return TensorFlowEngine(self)
