"""Copies batches from Python functions before TensorFlow splits them over the workers.

TensorFlow uses a function's or generator's NumPy array without a copy if its address is a multiple
of 64 bytes. It then writes results into slices of the array, as if nothing else used the memory: a
generator that yields `labels[start:stop]` finds `labels` changed from the second epoch on.
`dataset.rebatch([4, 4])` shows this in one process, without a strategy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from polytrain_tf.private import functions_of, sources_of

_OF_PYTHON = {"GeneratorDataset", "PyFunc", "PyFuncStateless", "EagerPyFunc"}
"""Operations that call Python functions."""


def with_arrays_copied(own_distribute: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a strategy's `experimental_distribute_dataset` so that it can't change users' arrays."""

    @functools.wraps(own_distribute)
    def distribute(dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return own_distribute(copied(dataset), *args, **kwargs)

    return distribute


def copied(dataset: Any) -> Any:
    """Return the data set, with each tensor copied if a Python function may have made it."""
    if not isinstance(dataset, tf.data.Dataset) or not calls_python(dataset):
        return dataset
    specification = dataset.element_spec

    def copy(*element: Any) -> Any:
        tensors = tf.nest.flatten(element, expand_composites=True)
        return tf.nest.pack_sequence_as(
            specification, [_copy(each) for each in tensors], expand_composites=True
        )

    return dataset.map(copy)


def _copy(tensor: Any) -> Any:
    # TensorFlow always copies arrays of other types, such as strings.
    has_numbers = tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool
    if not has_numbers and not tensor.dtype.is_complex:
        return tensor
    held = tf.raw_ops.DeepCopy(x=tensor)
    held.set_shape(tensor.shape)
    return held


def calls_python(dataset: Any) -> bool:
    """Return whether a step of a data set calls Python, as `from_generator` does."""
    functions = [function for step in steps(dataset) for function in functions_of(step)]
    return any(_OF_PYTHON & _operations(function.graph.as_graph_def()) for function in functions)


def _operations(graph: Any) -> set[str]:
    """Return the operations' types in a function's graph, and in the functions that it calls."""
    called = [node.op for function in graph.library.function for node in function.node_def]
    return {node.op for node in graph.node} | {*called}


def steps(dataset: Any) -> Iterator[Any]:
    """Yield a data set and, recursively, the data sets that it is made from."""
    yield dataset
    for source in sources_of(dataset):
        yield from steps(source)
