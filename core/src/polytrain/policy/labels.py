"""Which nodes the labels of a selector allow, as Ray compares them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

Labels = Mapping[str, str]

NODE_ID = "ray.io/node-id"
"""The label that Ray gives each node."""

_CONDITION = re.compile(r"(?P<is_not>!?)(?:in\((?P<listed>.*)\)|(?P<single>.*))")


def meets(labels: Labels, selector: Labels) -> bool:
    """Return whether a node's labels meet all conditions of a selector, as Ray compares them.

    Args:
        selector: a label's name → "value", "!value", "in(value,value)" or "!in(value,value)". A
            node that lacks the label meets those with "!".
    """
    for name, condition in selector.items():
        is_not, values = _parsed(condition)
        if (labels.get(name) in values) == is_not:
            return False
    return True


def allowed(nodes: Mapping[str, Labels], selectors: Iterable[Labels]) -> frozenset[str]:
    """Return the nodes that meet at least one of the selectors; all of them if there is none."""
    selectors = list(selectors)
    if not selectors:
        return frozenset(nodes)
    return frozenset(
        node for node, labels in nodes.items() if any(meets(labels, each) for each in selectors)
    )


def without(selector: Labels, nodes: Iterable[str]) -> dict[str, str]:
    """Return a selector that also excludes nodes.

    Args:
        selector: the user's selector, which may name nodes itself.
    """
    excluded = set(nodes)
    if not excluded:
        return dict(selector)
    is_not, named = _parsed(selector.get(NODE_ID, "!in()"))
    if is_not:
        condition = f"!in({_listed(named | excluded)})"
    else:
        # No node is named "none": the selector then matches none.
        condition = f"in({_listed(named - excluded) or 'none'})"
    return {**selector, NODE_ID: condition}


def _parsed(condition: str) -> tuple[bool, set[str]]:
    """Return whether a condition excludes its values, and the values."""
    match = _CONDITION.fullmatch(condition)
    assert match is not None
    listed = match["listed"]
    values = [match["single"]] if listed is None else listed.split(",")
    return bool(match["is_not"]), {value.strip() for value in values} - {""}


def _listed(values: Iterable[str]) -> str:
    return ",".join(sorted(values))
