"""The layers of Keras models, and whether `adapt` has fitted them to the same rows on all ranks.

Imports no framework: the plugins of TensorFlow and torch both train Keras models.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any


def nested_layers(model: Any) -> list[Any]:
    """Return a Keras model and all layers inside its layers.

    Keras has no public name for this: `model.layers` has only the outermost, and a model of a
    subclass may hold others in any attribute.
    """
    return list(model._flatten_layers())


def adapted_digests(model: Any) -> dict[str, int]:
    """Return a digest of what `adapt` has made of data, by layer; empty without such layers.

    Args:
        model: a `keras.Model`, with the layers inside its layers.

    Returns:
        Name of a layer → 32 bits of its statistics, bin boundaries or vocabulary.
    """
    return {
        layer.name: zlib.crc32(_fitted(layer))
        for layer in nested_layers(model)
        if callable(getattr(layer, "adapt", None))
    }


def unequal_layers(layers: Sequence[str]) -> ValueError:
    """Return the error for layers that differ by rank.

    Args:
        layers: their names.
    """
    return ValueError(
        f"{', '.join(layers)}: adapt() has seen other rows on this rank than on the others, so "
        "the ranks would train different models. Call it with all rows on every rank: give "
        "make_trainer the data a second time, under a name that "
        "DataConfig(datasets_to_split=['train']) leaves whole, and adapt to that."
    )


def _fitted(layer: Any) -> bytes:
    parts: Mapping[str, Any] = {
        "variables": [variable.numpy().tobytes() for variable in layer.variables],
        "boundaries": getattr(layer, "bin_boundaries", None),
        "vocabulary": layer.get_vocabulary() if hasattr(layer, "get_vocabulary") else None,
    }
    return repr(parts).encode()
