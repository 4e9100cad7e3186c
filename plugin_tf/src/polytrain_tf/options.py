"""Checks the options of the backend and of `Result.predict` on the driver, without Keras.

The workers make the remaining checks when they call `keras.Model.fit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from polytrain_plugins import (
    DatasetInfo,
    Job,
    Problem,
    column_remedy,
    is_instance_of,
    is_number,
    unknown_name,
)
from polytrain_plugins.type_names import a_type

_COMPILE = (
    *("optimizer", "loss", "loss_weights", "metrics", "weighted_metrics", "run_eagerly"),
    *("steps_per_execution", "jit_compile", "auto_scale_loss"),
)


_OF_PREDICT = ("features", "collate_fn", "custom_objects")


def model_problems(model: Any) -> Iterator[Problem]:
    """Yield a problem unless `model` is a function."""
    remedy = "Pass a function that returns a new keras.Model: model=build"
    if model is None:
        yield Problem(
            field="model",
            what="it is required without a training function",
            remedy=f"{remedy}; or a training function: make_trainer('tensorflow', train_func)",
        )
    elif is_instance_of(model, "keras", "Model"):
        yield Problem(
            field="model",
            what="a model can't be sent to the workers, which must create its variables",
            remedy=remedy,
        )
    elif not callable(model):
        yield Problem(field="model", what=f"{model!r} isn't a function", remedy=remedy)


def compile_problems(arguments: Any, job: Job) -> Iterator[Problem]:
    """Yield a problem for each argument that the model's `compile` wouldn't accept."""
    if callable(arguments):
        return
    if not isinstance(arguments, Mapping):
        yield Problem(
            field="compile",
            what=f"{arguments!r} is neither a dict nor a function",
            remedy="Pass compile={'optimizer': 'adam', 'loss': 'mse'}",
        )
        return
    for name, value in arguments.items():
        field = f"compile[{name!r}]"
        if name not in _COMPILE:
            yield from unknown_name(field, str(name), _COMPILE, "the arguments of compile")
        elif any(_is_kerass(each) for each in _all_in(value)):
            yield Problem(
                field=field,
                what=f"{value!r} has variables, which the workers must create",
                remedy=f"Pass a function: compile=lambda: {{{name!r}: …}}",
            )
    if arguments.get("steps_per_execution", 1) != 1:
        yield Problem(
            field="compile['steps_per_execution']",
            what="Keras can't take several steps per call under this strategy",
            remedy="Leave it out",
        )
    if arguments.get("jit_compile") is True and job.num_workers > 1 and not job.use_gpu:
        yield Problem(
            field="compile['jit_compile']",
            what="XLA can't compile what several TensorFlow workers do together on CPUs",
            remedy="Leave it out",
        )


def count_problems(**options: Any) -> Iterator[Problem]:
    """Yield a problem for each option that isn't a whole number of at least 1."""
    for option, value in options.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield Problem(
                field=option,
                what=f"{value!r} isn't a whole number of at least 1",
                remedy="Give 1 or more",
            )


def batch_problems(batch_size: Any, job: Job) -> Iterator[Problem]:
    """Yield a problem if a batch has fewer rows than there are workers."""
    if isinstance(batch_size, int) and 0 < batch_size < job.num_workers:
        yield Problem(
            field="batch_size",
            what=f"{batch_size} rows can't be divided among {job.num_workers} workers",
            remedy=f"It counts the rows of all workers together: give {job.num_workers} or more",
        )


def feature_problems(features: Any, others: Sequence[str | None], job: Job) -> Iterator[Problem]:
    """Yield a problem for each feature that doesn't exist, or isn't a number or a tensor."""
    is_one = isinstance(features, str)
    if is_one or (features is not None and not _are_names(features)):
        yield Problem(
            field="features",
            what=f"{features!r} is not a list of columns",
            remedy=f"Pass [{features!r}]" if is_one else "Pass their names: features=['x0', 'x1']",
        )
        return
    for name in features or ():
        if name in others:
            yield Problem(
                field="features",
                what=f"{name!r} is the label or the weight, not a feature",
                remedy="Leave it out of features",
            )
    chosen = _chosen(features, others, job)
    train = job.datasets.get("train")
    if train is not None and train.columns and not chosen:
        yield Problem(
            field="features",
            what="the data set 'train' has no columns to learn from",
            remedy=f"It has: {', '.join(train.columns)}",
        )
    for dataset in job.datasets.values():
        for name in chosen:
            if dataset.lacks(name):
                yield Problem(
                    field="features",
                    what=f"the data set {dataset.name!r} has no column {name!r}",
                    remedy=column_remedy(name, dataset.columns),
                )
            elif dataset.schema is not None and not _becomes_numbers(dataset.schema, name):
                kind = dataset.schema.field(name).type
                yield Problem(
                    field="features",
                    what=f"the column {name!r} of the data set {dataset.name!r} is {kind}, and "
                    "neither a number nor a tensor",
                    remedy="Encode it as numbers, or leave it out: features=[…]",
                )


def validation_problems(job: Job) -> Iterator[Problem]:
    """Yield a problem if there is more than one evaluation set: `fit` takes one."""
    others = sorted(set(job.datasets) - {"train"})
    if len(others) > 1:
        yield Problem(
            field="datasets",
            what=f"fit takes one data set besides 'train', and there are {', '.join(others)}",
            remedy="Keep one of them, and evaluate the others with result.load_model()",
        )


def callback_problems(callbacks: Any, job: Job) -> Iterator[Problem]:
    """Yield the problems of the callbacks."""
    if is_instance_of(callbacks, "keras", "Callback"):
        yield Problem(
            field="callbacks",
            what=f"{a_type(callbacks)} isn't a list of callbacks",
            remedy="Pass [callback]",
        )
    elif isinstance(callbacks, list | tuple | type):
        for callback in [callbacks] if isinstance(callbacks, type) else callbacks:
            yield from _no_callback(callback)
            refused = ["BackupAndRestore", *(["OrbaxCheckpoint"] if job.num_workers > 1 else [])]
            for name in refused:
                if is_instance_of(callback, "keras", name):
                    yield Problem(
                        field="callbacks",
                        what=f"{name} would write checkpoints of its own, beside the run's",
                        remedy="Use CheckpointConfig(checkpoint_frequency=1) instead",
                    )
    elif not callable(callbacks):
        yield Problem(
            field="callbacks",
            what=f"{callbacks!r} is neither a list of callbacks nor a function",
            remedy="Pass a list of keras.callbacks.Callback, or a function that returns one",
        )


def prediction_problems(options: Mapping[str, Any], data: DatasetInfo) -> Iterator[Problem]:
    """Yield the problems of the options.

    - `features`: the model's input columns, like the backend's option of this name; by default the
      columns that it was trained on, or all columns except label and weight.
    - `collate_fn`: makes the model's input from a dict of column name to NumPy array instead.
    - `custom_objects`: classes and functions that Keras doesn't know, by name.
    """
    for name in options:
        yield from unknown_name(name, name, _OF_PREDICT, "the options of predict with tensorflow")
    features, collate_fn = options.get("features"), options.get("collate_fn")
    if collate_fn is not None and not callable(collate_fn):
        yield Problem(
            field="collate_fn", what=f"{collate_fn!r} isn't a function", remedy="Pass a function"
        )
    if features is not None and collate_fn is not None:
        yield Problem(
            field="features",
            what="it can't be used with collate_fn, which makes the model's input",
            remedy="Leave one of the two out",
        )
    for name in [features] if isinstance(features, str) else features or ():
        if data.lacks(name):
            yield Problem(
                field="features",
                what=f"the data has no column {name!r}",
                remedy=column_remedy(name, data.columns),
            )


def _no_callback(callback: Any) -> Iterator[Problem]:
    if isinstance(callback, type):
        yield Problem(
            field="callbacks",
            what=f"{callback.__name__} is a class, not a callback object",
            remedy=f"Pass [{callback.__name__}(…)]",
        )
    elif not is_instance_of(callback, "keras", "Callback"):
        yield Problem(
            field="callbacks",
            what=f"{callback!r} isn't a keras.callbacks.Callback",
            remedy="Pass objects, as in [keras.callbacks.TerminateOnNaN()]",
        )


def _are_names(features: Any) -> bool:
    return isinstance(features, Iterable) and all(isinstance(name, str) for name in features)


def _chosen(features: Sequence[str] | None, others: Sequence[str | None], job: Job) -> list[str]:
    """Return the feature columns; by default all columns of "train" except `others`."""
    if features is not None:
        return list(features)
    train = job.datasets.get("train")
    return [name for name in train.columns if name not in others] if train is not None else []


def _becomes_numbers(schema: Any, name: str) -> bool:
    import pyarrow as pa

    kind = schema.field(name).type
    return is_number(kind) or isinstance(kind, pa.FixedShapeTensorType)


def _is_kerass(value: Any) -> bool:
    return any(cls.__module__.partition(".")[0] == "keras" for cls in type(value).__mro__)


def _all_in(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _all_in(each)
    else:
        yield value
