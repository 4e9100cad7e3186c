"""Predicts with a module that the user's function builds, and the checkpoint's weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from polytrain.extension import TensorShapes, to_format
from polytrain_plugins import Predictions
from polytrain_plugins.type_names import a_type
from polytrain_torch.moving import moved

_SHAPES = TensorShapes(
    "data", "Pass collate_fn=…, which makes the model's input from a dict of arrays."
)


class ModulePredictor:
    """Predicts rows of a table with a module in evaluation mode."""

    def __init__(
        self,
        directory: Path,
        load: Callable[[Path], Any],
        *,
        model_fn: Callable[..., torch.nn.Module],
        features: str | Sequence[str] | None = None,
        collate_fn: Callable[[dict[str, Any]], Any] | None = None,
        forward: Callable[[torch.nn.Module, Any], Any] | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        """See `prediction_problems` for the options.

        `load` loads the `state_dict` in a checkpoint's directory.
        """
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._features = features
        self._collate = collate_fn
        self._forward = forward or _called
        self._model = _built(model_fn, directory, load).to(self._device).eval()

    def __call__(self, table: pa.Table) -> Predictions:
        """Return the module's predictions, an array of shape (rows, …) or a dict of arrays."""
        with torch.inference_mode():
            output = self._forward(self._model, moved(self._input(table), self._device))
        if isinstance(output, Mapping):
            return {str(name): _array(value) for name, value in output.items()}
        return _array(output)

    def _input(self, table: pa.Table) -> Any:
        if self._collate is not None:
            return self._collate(to_format(table, "numpy"))
        names = self._features
        if isinstance(names, str):
            return _tensors(table.select([names]))[names]
        if names is not None:
            columns = _tensors(table.select(list(names)))
            return torch.stack([column.float() for column in columns.values()], dim=1)
        tensors = _tensors(table)
        return tensors if len(tensors) > 1 else next(iter(tensors.values()))


def takes_directory(model_fn: Callable[..., Any]) -> bool:
    """Whether a function takes the checkpoint's directory, and loads the weights itself."""
    try:
        parameters = inspect.signature(model_fn).parameters.values()
    except (TypeError, ValueError):  # some callables in C have no signature
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.kind in positional and p.default is p.empty for p in parameters)


def _built(
    model_fn: Callable[..., Any], directory: Path, load: Callable[[Path], Any]
) -> torch.nn.Module:
    loads_itself = takes_directory(model_fn)
    model = model_fn(str(directory)) if loads_itself else model_fn()
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model_fn returned {a_type(model)}, not a torch.nn.Module.")
    if not loads_itself:
        try:
            model.load_state_dict(load(directory))
        except RuntimeError as error:
            raise ValueError(
                f"The module that model_fn builds doesn't fit the checkpoint's weights: {error}. "
                "Build it as in training, before it is wrapped by prepare_model"
            ) from error
    return model


def _called(model: torch.nn.Module, batch: Any) -> Any:
    return model(batch)


def _tensors(table: pa.Table) -> dict[str, torch.Tensor]:
    batch = to_format(table, "numpy")
    for name, array in batch.items():
        _SHAPES.check(name, array)
    # Copy: torch warns about read-only memory, such as the table's.
    return {name: torch.as_tensor(np.array(array)) for name, array in batch.items()}


def _array(output: Any) -> np.ndarray[Any, Any]:
    if isinstance(output, np.ndarray):
        return output
    if not isinstance(output, torch.Tensor):
        raise TypeError(
            f"The model returned {a_type(output)}. Pass forward=…, a function of the "
            "module and a batch that returns a tensor, or a dict of tensors by name."
        )
    output = output.detach().cpu()
    # NumPy has no bfloat16.
    return (output.float() if output.dtype is torch.bfloat16 else output).numpy()
