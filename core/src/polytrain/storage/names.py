"""Checks names that are read from a storage: anyone who can write there may choose them. Pure."""

from __future__ import annotations


def expect_inside(name: str) -> str:
    """Return the name if, as a path, it stays in the directory that it is joined to.

    Keys of objects and names in manifests may be any text, and could lead anywhere.

    Args:
        name: relative to that directory, with forward slashes.

    Raises:
        ValueError: it leads elsewhere, or could; the message names it.
    """
    wrong = _reason_not_inside(name)
    if wrong is not None:
        raise ValueError(f"{name!r}, which the storage tells of, isn't used as a path: {wrong}")
    return name


def _reason_not_inside(name: str) -> str | None:
    if not name:
        return "it is empty"
    if "\0" in name:
        return "it holds a NUL"
    if name.startswith("/"):
        return "it is absolute"
    if not {".", ".."}.isdisjoint(name.split("/")):
        return "one of its parts is '.' or '..'"
    return None
