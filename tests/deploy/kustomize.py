"""As much of kustomize as `examples/deploy` uses: pip and Debian have no kustomize to install.

`test_kuberay.py` compares it with the real one where kubectl is installed.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonpatch
import yaml

Objects = list[dict[str, Any]]

_KNOWN = {"apiVersion", "kind", "resources", "components", "replacements", "patches", "images"}


def build(directory: Path, objects: Objects = []) -> Objects:  # noqa: B006 - it isn't changed
    """Return what `kubectl kustomize directory` prints, in any order.

    Args:
        directory: it has a `kustomization.yaml`.
        objects: for a component, those that it changes.
    """
    steps = yaml.safe_load((directory / "kustomization.yaml").read_text())
    assert steps.keys() <= _KNOWN, f"{directory}: not known here: {steps.keys() - _KNOWN}"
    objects = deepcopy(objects)
    for resource in steps.get("resources", ()):
        path = (directory / resource).resolve()
        objects += build(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    for component in steps.get("components", ()):
        objects = build((directory / component).resolve(), objects)
    for patch in steps.get("patches", ()):
        objects = _patched(objects, patch)
    for replacement in steps.get("replacements", ()):
        _replace(objects, replacement)
    for image in steps.get("images", ()):
        _name_image(objects, image)
    return objects


def _patched(objects: Objects, patch: dict[str, Any]) -> Objects:
    change = yaml.safe_load(patch["patch"])
    if isinstance(change, list):
        changed = [_is(each, patch["target"]) for each in objects]
        assert any(changed), patch["target"]
        return [
            jsonpatch.apply_patch(each, change) if is_target else each
            for each, is_target in zip(objects, changed, strict=True)
        ]
    assert change.pop("$patch") == "delete", "of merges only deletions are known here"
    return [each for each in objects if not _is(each, change)]


def _is(each: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all(
        _is(each[key], value) if isinstance(value, dict) else each[key] == value
        for key, value in wanted.items()
    )


def _replace(objects: Objects, replacement: dict[str, Any]) -> None:
    source = dict(replacement["source"])
    path = source.pop("fieldPath").split(".")
    (value,) = (each for each in objects if _is(each, source))
    for part in path:
        value = value[part]
    for target in replacement["targets"]:
        (place,) = (each for each in objects if _is(each, target["select"]))
        for name in target["fieldPaths"]:
            place[name] = deepcopy(value)


def _name_image(value: Any, image: dict[str, str]) -> None:
    if isinstance(value, list):
        for each in value:
            _name_image(each, image)
    elif isinstance(value, dict):
        for container in value.get("containers", ()):
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
        for each in value.values():
            _name_image(each, image)
