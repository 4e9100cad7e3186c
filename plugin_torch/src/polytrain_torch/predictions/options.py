"""Checks the options of `Result.predict`, without importing torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from polytrain_plugins import DatasetInfo, Problem, column_remedy, is_instance_of, unknown_name
from polytrain_plugins.type_names import a_type

if TYPE_CHECKING:
    import pyarrow as pa

_TEXTS = ("string", "large_string", "binary", "large_binary")

OPTIONS = ("model_fn", "features", "collate_fn", "forward", "device")


def prediction_problems(options: Mapping[str, Any], data: DatasetInfo) -> Iterator[Problem]:
    """Yield problems of the options.

    - `model_fn` takes no arguments and builds the module, which then gets the checkpoint's weights;
      or it takes the checkpoint's directory and returns the module with its weights.
    - `features` names the module's input: the tensor of one column, or a float32 matrix of shape
      (rows, columns) of several. By default the input is a dict with the tensors of all columns, or
      the tensor of the only one.
    - `collate_fn` makes the module's input from a dict of column name to NumPy array instead.
    - `forward` is called with the module and the input; by default the module is called.
    - `device` is the module's device; by default this process's GPU, or the CPU.
    """
    for name in options:
        yield from unknown_name(name, name, OPTIONS, "the options of predict with torch")
    yield from _model_problems(options.get("model_fn"))
    for name in ("collate_fn", "forward"):
        if options.get(name) is not None and not callable(options[name]):
            yield Problem(
                field=name, what=f"{options[name]!r} isn't a function", remedy="Pass a function"
            )
    features = options.get("features")
    if features is not None and options.get("collate_fn") is not None:
        yield Problem(
            field="features",
            what="it can't be used with collate_fn, which makes the module's input",
            remedy="Leave one of the two out",
        )
    if options.get("collate_fn") is None:
        names = [features] if isinstance(features, str) else features or data.columns
        yield from _column_problems(names, data)


def is_text(kind: pa.DataType) -> bool:
    """Whether values of a type are texts, or lists of them, which no tensor holds."""
    return str(getattr(kind, "value_type", kind)) in _TEXTS


def _column_problems(names: Iterable[str], data: DatasetInfo) -> Iterator[Problem]:
    for name in names:
        kind = data.type_of(name)
        if data.lacks(name):
            yield Problem(
                field="features",
                what=f"the data has no column {name!r}",
                remedy=column_remedy(name, data.columns),
            )
        elif kind is not None and is_text(kind):
            yield Problem(
                field="features",
                what=f"the column {name!r} is {kind}, which can't become a tensor",
                remedy="Name the columns that the module gets, as in features=['x0', 'x1'], or "
                "pass collate_fn=…, which makes its input from a dict of arrays",
            )


def _model_problems(model_fn: Any) -> Iterator[Problem]:
    remedy = "Pass a function that returns a new torch.nn.Module: model_fn=build"
    if model_fn is None:
        yield Problem(
            field="model_fn",
            what="it is required: a checkpoint of torch has the weights of a module, and not its "
            "code",
            remedy=remedy,
        )
    elif is_instance_of(model_fn, "torch", "Module"):
        yield Problem(
            field="model_fn",
            what=f"{a_type(model_fn)} is a module, not a function",
            remedy=f"{remedy}; or load the weights and call it yourself, with result.load_model()",
        )
    elif not callable(model_fn):
        yield Problem(field="model_fn", what=f"{model_fn!r} isn't a function", remedy=remedy)
