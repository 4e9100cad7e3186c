"""The initial score of boosting, the same at any number of workers.

LightGBM itself averages the workers' scores without regard to their numbers of rows. Here one
worker estimates the score from all labels, as LightGBM does in one process. All workers start with
it, and it is added to the first trees, as in LightGBM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightgbm
import numpy as np

from polytrain_lightgbm.parameters import PARAMETERS_OF_FEATURES, without

_NOTHING = 1e-15
"""LightGBM doesn't add a score whose absolute value is at most this."""


class FirstScore:
    """The score of every row before the first round: one number for each tree of a round."""

    def __init__(self, scores: Sequence[float]) -> None:
        self.scores = tuple(scores)
        self._shrinkages: dict[int, float] = {}
        """Index of a first tree → its shrinkage when the score was added."""

    def of_rows(self, rows: int) -> np.ndarray[Any, Any]:
        """Return the score for `lightgbm.Dataset`: float64, shape `[trees * rows]`, by tree."""
        return np.repeat(np.array(self.scores), rows)

    def add_to_first_trees(self, booster: lightgbm.Booster) -> None:
        """Add the score to the leaves of the first round's trees, after that round."""
        for index, tree in enumerate(_first_trees(booster)):
            if abs(self.scores[index]) > _NOTHING:
                self._shrinkages[index] = tree["shrinkage"]
                for leaf in range(tree["num_leaves"]):
                    value = booster.get_leaf_output(index, leaf)
                    booster.set_leaf_output(index, leaf, value + self.scores[index])

    def as_text(self, booster: lightgbm.Booster, iterations: int = -1) -> str:
        """Return the model's text, with first trees as LightGBM in one process writes them.

        LightGBM can set only a tree's leaves. The inner nodes' values and the shrinkage are changed
        in the text.

        Args:
            booster: the model.
            iterations: how many of its first iterations; -1 for all.
        """
        trees = _first_trees(booster) if self._shrinkages else []
        changes = {}
        for index, shrinkage in self._shrinkages.items():
            # It isn't 1 if DART has scaled the tree since.
            scale = trees[index]["shrinkage"] / shrinkage
            values = dict(inner_values(trees[index]["tree_structure"]))
            inner = [values[node] + scale * self.scores[index] for node in sorted(values)]
            changes[index] = {"shrinkage": f"{scale:g}"}
            if inner:
                changes[index]["internal_value"] = " ".join(f"{value:g}" for value in inner)
        return with_trees(booster.model_to_string(num_iteration=iterations), changes)


def estimated(
    labels: np.ndarray[Any, Any],
    weights: np.ndarray[Any, Any] | None,
    query_sizes: np.ndarray[Any, Any] | None,
    params: Mapping[str, Any],
) -> FirstScore:
    """Estimate the initial score as LightGBM in one process does, by a model that learns nothing.

    Args:
        labels: labels of all ranks' rows, shape `[rows]`.
        weights: weights of these rows, shape `[rows]`, or None.
        query_sizes: number of rows of each query, shape `[queries]`, or None.
        params: LightGBM's parameters.
    """
    params = {
        **without(params, PARAMETERS_OF_FEATURES),
        **{"num_threads": 1, "num_leaves": 2, "feature_pre_filter": False},
    }
    nothing = np.zeros((len(labels), 1))
    data = lightgbm.Dataset(nothing, label=labels, weight=weights, group=query_sizes, params=params)
    booster = lightgbm.Booster(params, data)
    booster.update()
    return FirstScore(booster.predict(nothing[:1], raw_score=True).ravel().tolist())


def inner_values(node: Mapping[str, Any]) -> Iterator[tuple[int, float]]:
    """Yield the number and the value of each inner node of a tree."""
    nodes: list[Mapping[str, Any]] = [node]
    while nodes:
        node = nodes.pop()
        if "split_index" in node:
            yield node["split_index"], node["internal_value"]
            nodes += (node["left_child"], node["right_child"])


def with_trees(text: str, changes: Mapping[int, Mapping[str, str]]) -> str:
    """Return a model's text with some lines of trees replaced, and `tree_sizes` corrected.

    Args:
        text: the model's text.
        changes: number of a tree, from 0 → name of a line → its new value.
    """
    if not changes:
        return text
    sizes = re.search(r"^tree_sizes=(.*)$", text, re.MULTILINE)
    assert sizes is not None
    begin = end = text.index("Tree=0\n")
    trees = []
    for index, size in enumerate(map(int, sizes[1].split())):
        tree, end = text[end : end + size], end + size
        for name, line in changes.get(index, {}).items():
            tree = re.sub(rf"(?m)^{name}=.*$", f"{name}={line}", tree)
        trees.append(tree)
    corrected = " ".join(str(len(tree)) for tree in trees)
    head = text[: sizes.start(1)] + corrected + text[sizes.end(1) : begin]
    return "".join((head, *trees, text[end:]))


def with_rows_of_unsplit(text: str, *, first: int, read: int, rows: int) -> str:
    """Return a model's text with the weight and the rows of the leaf of trees without a split.

    LightGBM writes the rows of one machine, and no weight once it has read such a tree.

    Args:
        text: the model's text.
        first: number of the first tree that the run has grown, from 0.
        read: number of trees that were read: rows of theirs are already right.
        rows: number of rows on all machines.
    """
    changes: dict[int, dict[str, str]] = {}
    for found in re.finditer(r"(?m)^Tree=(\d+)\nnum_leaves=1\n(?:.+\n)+", text):
        index = int(found[1])
        if index >= first:
            changes[index] = {"leaf_weight": "0"}
            if index >= read and re.search(r"(?m)^leaf_count=[1-9]", found[0]):
                changes[index]["leaf_count"] = str(rows)
    return with_trees(text, changes)


def _first_trees(booster: lightgbm.Booster) -> list[Mapping[str, Any]]:
    trees: list[Mapping[str, Any]] = booster.dump_model(num_iteration=1)["tree_info"]
    return trees
