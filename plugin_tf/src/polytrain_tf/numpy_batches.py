"""Batches that Python functions make, copied before TensorFlow splits them over the workers.

TensorFlow takes a NumPy array of a function or generator as it is, without a copy, if it begins at
a multiple of 64 bytes. It then writes results into slices of it, as if nothing else used the
memory: a generator that yields `labels[start:stop]` ends up with differences in `labels`, from the
second epoch on. `dataset.rebatch([4, 4])` shows the same in one process, without a strategy.
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
    """A strategy's `experimental_distribute_dataset` that leaves users' arrays alone."""

    @functools.wraps(own_distribute)
    def distribute(dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return own_distribute(copied(dataset), *args, **kwargs)

    return distribute


def copied(dataset: Any) -> Any:
    """The data set, with a copy of each tensor if a Python function may have made it."""
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
    # Others, such as texts, are never taken without a copy.
    has_numbers = tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool
    if not has_numbers and not tensor.dtype.is_complex:
        return tensor
    held = tf.raw_ops.DeepCopy(x=tensor)
    held.set_shape(tensor.shape)
    return held


def calls_python(dataset: Any) -> bool:
    """Whether a step of a data set is a Python function: `from_generator`, `numpy_function`."""
    functions = [function for step in steps(dataset) for function in functions_of(step)]
    return any(_OF_PYTHON & _operations(function.graph.as_graph_def()) for function in functions)


def _operations(graph: Any) -> set[str]:
    """The kinds of operations in a function, and in those that it calls."""
    called = [node.op for function in graph.library.function for node in function.node_def]
    return {node.op for node in graph.node} | {*called}


def steps(dataset: Any) -> Iterator[Any]:
    """A data set and those that it is made of."""
    yield dataset
    for source in sources_of(dataset):
        yield from steps(source)
