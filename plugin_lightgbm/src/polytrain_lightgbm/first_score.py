"""The initial score of boosting, the same at any number of workers.

By itself LightGBM averages the workers' scores, whatever their numbers of rows. Here one worker
estimates the score on all labels, as LightGBM does in one process. All workers start with it, and
it is added to the first trees, as in LightGBM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightgbm
import numpy as np

from polytrain_lightgbm.parameters import OF_FEATURES, without

_NOTHING = 1e-15
"""LightGBM doesn't add a score that is this close to zero."""


class FirstScore:
    """The score of every row before the first round, one for each of the round's trees."""

    def __init__(self, scores: Sequence[float]) -> None:
        self.scores = tuple(scores)
        self._shrinkages: dict[int, float] = {}
        """Of the trees that a score was added to, when it was."""

    def of_rows(self, rows: int) -> np.ndarray[Any, Any]:
        """As `lightgbm.Dataset` takes it: float64, all rows for one tree, then for the next."""
        return np.repeat(np.array(self.scores), rows)

    def add_to_first_trees(self, booster: lightgbm.Booster) -> None:
        """Have the trees of the first round, the only one so far, predict it too."""
        for index, tree in enumerate(_first_trees(booster)):
            if abs(self.scores[index]) > _NOTHING:
                self._shrinkages[index] = tree["shrinkage"]
                for leaf in range(tree["num_leaves"]):
                    value = booster.get_leaf_output(index, leaf)
                    booster.set_leaf_output(index, leaf, value + self.scores[index])

    def as_text(self, booster: lightgbm.Booster) -> str:
        """The model, with first trees as LightGBM alone writes them.

        Leaves are all of a tree that can be set. In the text there are two more places: what would
        be predicted at the inner nodes, and that the tree isn't shrunken.
        """
        text = booster.model_to_string(num_iteration=-1)
        trees = _first_trees(booster) if self._shrinkages else []
        for index, shrinkage in self._shrinkages.items():
            # Not 1 if DART has shrunken the tree again.
            scale = trees[index]["shrinkage"] / shrinkage
            values = dict(inner_values(trees[index]["tree_structure"]))
            inner = [values[node] + scale * self.scores[index] for node in sorted(values)]
            lines = {"shrinkage": f"{scale:g}"}
            if inner:
                lines["internal_value"] = " ".join(f"{value:g}" for value in inner)
            text = with_tree(text, index, lines)
        return text


def estimated(
    labels: np.ndarray[Any, Any],
    weights: np.ndarray[Any, Any] | None,
    query_sizes: np.ndarray[Any, Any] | None,
    params: Mapping[str, Any],
) -> FirstScore:
    """What LightGBM in one process begins with: the prediction of a model that can learn nothing.

    Args:
        labels: of all rows.
        weights: of all rows, or None.
        query_sizes: rows of each query, or None.
        params: LightGBM's.
    """
    params = {
        **without(params, OF_FEATURES),
        **{"num_threads": 1, "num_leaves": 2, "feature_pre_filter": False},
    }
    nothing = np.zeros((len(labels), 1))
    data = lightgbm.Dataset(nothing, label=labels, weight=weights, group=query_sizes, params=params)
    booster = lightgbm.Booster(params, data)
    booster.update()
    return FirstScore(booster.predict(nothing[:1], raw_score=True).ravel().tolist())


def inner_values(node: Mapping[str, Any]) -> Iterator[tuple[int, float]]:
    """The values of a tree's inner nodes, by number."""
    nodes: list[Mapping[str, Any]] = [node]
    while nodes:
        node = nodes.pop()
        if "split_index" in node:
            yield node["split_index"], node["internal_value"]
            nodes += (node["left_child"], node["right_child"])


def with_tree(text: str, index: int, lines: Mapping[str, str]) -> str:
    """The model with other lines in one of its trees; it says how long each tree is."""
    sizes = re.search(r"^tree_sizes=(.*)$", text, re.MULTILINE)
    assert sizes is not None
    numbers = [int(size) for size in sizes[1].split()]
    start = text.index(f"Tree={index}\n")
    tree = text[start : start + numbers[index]]
    after = text[start + numbers[index] :]
    for name, line in lines.items():
        tree = re.sub(rf"(?m)^{name}=.*$", f"{name}={line}", tree)
    numbers[index] = len(tree)
    before = text[: sizes.start(1)] + " ".join(map(str, numbers)) + text[sizes.end(1) : start]
    return before + tree + after


def _first_trees(booster: lightgbm.Booster) -> list[Mapping[str, Any]]:
    trees: list[Mapping[str, Any]] = booster.dump_model(num_iteration=1)["tree_info"]
    return trees
