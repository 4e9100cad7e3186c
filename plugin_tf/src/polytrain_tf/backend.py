"""The backend: the options of `model.fit`, for training without a training function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from polytrain_plugins import (
    Backend,
    Capabilities,
    DatasetInfo,
    Demand,
    Device,
    Job,
    Problem,
    missing_columns,
    needed_without_function,
    number_problems,
    options_beside_function,
    timeout_problems,
)
from polytrain_tf.options import (
    batch_problems,
    callback_problems,
    compile_problems,
    count_problems,
    feature_problems,
    model_problems,
    prediction_problems,
    validation_problems,
)

if TYPE_CHECKING:
    from polytrain_tf.engine import TensorFlowEngine


MODEL_FILE = "model.keras"

_PRELOAD = (
    "tensorflow",
    "keras",
    "polytrain_tf.engine",
    "polytrain_tf.keras_fit",
    "polytrain_tf.fitting",
)
"""The same with a training function and without one: the next run then has the same zygote."""

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
    """Keras's `fit` under a `MultiWorkerMirroredStrategy`, or a training function that uses one.

    With a training function, leave all options except `timeout_s` unset.
    """

    name: ClassVar[str] = "tensorflow"
    contract_version: ClassVar[int] = 1
    capabilities: ClassVar[Capabilities] = Capabilities(
        declarative=True, predictive=True, devices=frozenset({Device.CPU, Device.GPU})
    )
    requires: ClassVar[dict[str, str]] = {
        "tensorflow": "pip install 'polytrain[tf]', or 'polytrain[tf-cpu]' without GPUs"
    }
    mutable_on_resume: ClassVar[frozenset[str]] = frozenset({"timeout_s", "epochs"})
    prediction_batch_size: ClassVar[int | None] = 256

    timeout_s: float | None = None
    """Seconds after which a collective operation fails if a peer doesn't join it; None for no
    limit. A limit slows small steps, because TensorFlow watches every operation. A run detects
    hangs without it."""

    model: Callable[[], Any] | None = None
    """A function that returns a `keras.Model`, compiled or not. Every worker calls it, in the
    strategy's scope."""

    compile: Mapping[str, Any] | Callable[[], Mapping[str, Any]] = field(default_factory=dict)
    """Arguments of the model's `compile`: a dict of names and plain values, or a function that
    returns one, which may hold Keras objects."""

    epochs: int = 1
    """Total number of epochs, including those before a restart."""

    batch_size: int = 32
    """Global batch size: maximum number of rows in a batch, over all workers together."""

    label: str | None = None
    """Column to predict."""

    features: Sequence[str] | None = None
    """Columns to learn from: numbers, which become a float32 matrix `(rows, columns)`, or one
    column of tensors `(rows, …)`. By default all columns of "train" except label and weight."""

    weight: str | None = None
    """Column with the weights of the rows."""

    callbacks: Sequence[Any] | Callable[[], Sequence[Any]] = ()
    """Keras's callbacks, or a function that returns them. Every worker calls them. After a restart
    `EarlyStopping`, `ReduceLROnPlateau`, `ModelCheckpoint` and `SwapEMAWeights` keep their state;
    others start fresh."""

    @property
    def total_steps(self) -> int:
        return self.epochs

    def problems(self, job: Job) -> Iterable[Problem]:
        if self.timeout_s is not None:
            yield from timeout_problems(timeout_s=self.timeout_s)
        if job.has_training_function:
            yield from options_beside_function(self, _DECLARATIVE)
            return
        yield from model_problems(self.model)
        yield from compile_problems(self.compile, job)
        yield from count_problems(epochs=self.epochs, batch_size=self.batch_size)
        yield from batch_problems(self.batch_size, job)
        yield from needed_without_function(self, label="Name the column to predict")
        yield from missing_columns(job, label=self.label, weight=self.weight)
        yield from number_problems(job, of_classes=("label",), label=self.label, weight=self.weight)
        yield from feature_problems(self.features, [self.label, self.weight], job)
        yield from validation_problems(job)
        yield from callback_problems(self.callbacks, job)

    def prediction_problems(
        self, options: Mapping[str, Any], data: DatasetInfo
    ) -> Iterable[Problem]:
        yield from prediction_problems(options, data)

    def demand(self, job: Job) -> Demand:
        return Demand(
            # By default TensorFlow's C++ code logs every optimisation and cancelled collective.
            environment={"TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_VERBOSITY": "ERROR"},
            preload=_PRELOAD,
            ports=1,
            complete={} if job.has_training_function else self._complete,
        )

    @property
    def _complete(self) -> dict[str, str]:
        """Option → column in which every row needs a value: otherwise the loss is NaN."""
        loss = self.compile.get("loss") if isinstance(self.compile, Mapping) else None
        # A loss of the user's own may pass over such labels.
        columns = {"label": self.label if isinstance(loss, str) else None, "weight": self.weight}
        return {option: column for option, column in columns.items() if column is not None}

    def engine(self) -> TensorFlowEngine:
        from polytrain_tf.engine import TensorFlowEngine

        return TensorFlowEngine(self)
