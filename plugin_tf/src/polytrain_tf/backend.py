"""The driver half: what `model.fit` is called with, where there is no training function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from polytrain_plugins import (
    Backend,
    Capabilities,
    Demand,
    Device,
    Job,
    Problem,
    missing_columns,
    missing_label,
    number_problems,
    options_beside_function,
)
from polytrain_tf.fit_options import (
    batch_problems,
    callback_problems,
    compile_problems,
    count_problems,
    feature_problems,
    model_problems,
    validation_problems,
)

if TYPE_CHECKING:
    from polytrain_tf.engine import TensorFlowEngine


MODEL_FILE = "model.keras"

_DECLARATIVE = (
    "model",
    "compile",
    "epochs",
    "batch_size",
    "label",
    "features",
    "weight",
    "callbacks",
)


@dataclass(frozen=True, kw_only=True)
class TensorFlow(Backend):
    """Keras's `fit` under a `MultiWorkerMirroredStrategy`; or a training function that uses that.

    With a training function all options but `timeout_s` stay unset.
    """

    name: ClassVar[str] = "tensorflow"
    contract_version: ClassVar[int] = 1
    capabilities: ClassVar[Capabilities] = Capabilities(
        declarative=True, devices=frozenset({Device.CPU, Device.GPU})
    )
    requires: ClassVar[dict[str, str]] = {
        "tensorflow": "pip install 'polytrain[tf]', or 'polytrain[tf-cpu]' without GPUs"
    }
    mutable_on_resume: ClassVar[frozenset[str]] = frozenset({"timeout_s", "epochs"})

    timeout_s: float | None = None
    """Seconds after which a collective operation whose peers don't come gives up; None for no
    limit. TensorFlow watches every operation that has one, which small steps feel; a run notices
    hangs without it."""

    model: Callable[[], Any] | None = None
    """A function that returns a `keras.Model`, compiled or not. Every worker calls it, in the
    strategy's scope."""

    compile: Mapping[str, Any] | Callable[[], Mapping[str, Any]] = field(default_factory=dict)
    """Arguments of the model's `compile`: a dict of names and plain values, or a function that
    returns one, whose objects may be Keras's own."""

    epochs: int = 1
    """Epochs in all, those before a restart included."""

    batch_size: int = 32
    """Rows in the batches of all workers together, at most."""

    label: str | None = None
    """Column to predict."""

    features: Sequence[str] | None = None
    """Columns to learn from: numbers, which become a float32 matrix `(rows, columns)`, or one
    column of tensors `(rows, …)`. By default all others of "train"."""

    weight: str | None = None
    """Column with the weights of the rows."""

    callbacks: Sequence[Any] | Callable[[], Sequence[Any]] = ()
    """Keras's callbacks, or a function that returns them. Every worker has them. After a restart
    they are new ones, but what those of Keras's that watch for progress had seen goes on."""

    def problems(self, job: Job) -> Iterable[Problem]:
        if self.timeout_s is not None and not _is_time(self.timeout_s):
            yield Problem(
                field="timeout_s",
                what=f"{self.timeout_s!r} is not a time",
                remedy="Give seconds, more than 0, or None",
            )
        if job.has_training_function:
            yield from options_beside_function(self, _DECLARATIVE)
            return
        yield from model_problems(self.model)
        yield from compile_problems(self.compile)
        yield from count_problems(epochs=self.epochs, batch_size=self.batch_size)
        yield from batch_problems(self.batch_size, job)
        yield from missing_label(self.label)
        yield from missing_columns(job, label=self.label, weight=self.weight)
        yield from number_problems(job, label=self.label, weight=self.weight)
        yield from feature_problems(self.features, [self.label, self.weight], job)
        yield from validation_problems(job)
        yield from callback_problems(self.callbacks, job)

    def demand(self, job: Job) -> Demand:
        return Demand(
            # Its C++ side announces every optimisation and every cancelled collective otherwise.
            environment={"TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_VERBOSITY": "ERROR"},
            preload=(
                *("tensorflow", "keras", "polytrain_tf.engine", "polytrain_tf.keras_fit"),
                *(() if job.has_training_function else ("polytrain_tf.fitting",)),
            ),
        )

    def engine(self) -> TensorFlowEngine:
        from polytrain_tf.engine import TensorFlowEngine

        return TensorFlowEngine(self)


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0
