"""Finds backends: names come from metadata, and only the requested one is imported."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import is_dataclass
from importlib.metadata import EntryPoint
from typing import Any

import pluggy

from polytrain_plugins.backend import CONTRACT_VERSION, Backend, Capabilities
from polytrain_plugins.close_names import close_to
from polytrain_plugins.errors import (
    AmbiguousBackendError,
    BackendImportError,
    ContractVersionError,
    RegistryError,
    UnknownBackendError,
)
from polytrain_plugins.hookspecs import PROJECT, BackendHooks
from polytrain_plugins.installed import install_command, installed_entry_points
from polytrain_plugins.type_names import a_type

GROUP = "polytrain.backends"

# Names that users type, and the extra of the umbrella distribution that installs each.
_FIRST_PARTY_EXTRAS = {
    "torch": "torch",
    "xgboost": "xgboost",
    "lightgbm": "lightgbm",
    "tensorflow": "tf",
}

# Names that users may know a backend by.
_OTHER_NAMES = {
    "keras": "tensorflow",
    "lgbm": "lightgbm",
    "pytorch": "torch",
    "tf": "tensorflow",
    "xgb": "xgboost",
}


def backend_names() -> tuple[str, ...]:
    """Names of the installed backends, sorted. Imports none of them."""
    return tuple(sorted(_entry_points_by_name()))


def load_backend(name: str) -> type[Backend]:
    """Import the backend of this name, and no other.

    Raises:
        UnknownBackendError: no installed distribution provides it.
        AmbiguousBackendError: several do.
        BackendImportError: its module can't be imported.
        ContractVersionError: it was written for a different version of the contract.
        RegistryError: its module doesn't provide the backend that its metadata names, or provides
            no class that can be used.
    """
    entry_point = _the_entry_point(name)
    try:
        plugin = entry_point.load()
    except (Exception, SystemExit) as error:
        raise BackendImportError(
            f"The backend {name!r} of {_distribution(entry_point)} can't be imported "
            f"({type(error).__name__}: {error}). Reinstall it with: {install_line(name)}"
        ) from error
    return _checked(name, entry_point, _provided(plugin, entry_point))


def expect_usable(backend: Any, *, remedy: str = "") -> None:
    """Check a backend, or its class, wherever it comes from.

    Args:
        remedy: how to install another version; empty if the user has passed the backend itself.

    Raises:
        ContractVersionError: it was written for a different version of the contract.
        RegistryError: it isn't a dataclass, or lacks what every backend declares.
    """
    cls = backend if isinstance(backend, type) else type(backend)
    name = f"{cls.__module__}.{cls.__qualname__}"
    version = getattr(backend, "contract_version", None)
    if version != CONTRACT_VERSION:
        raise ContractVersionError(
            f"The backend {name} was written for version {version!r} of the backend contract; this "
            f"is version {CONTRACT_VERSION}. "
            f"{remedy or 'Its `contract_version` says for which version its methods are written.'}"
        )
    if not is_dataclass(cls):
        raise RegistryError(
            f"The backend {name} is not a dataclass, whose fields are its options: put "
            "@dataclass(frozen=True, kw_only=True) before the class."
        )
    declared = (
        ("name", str, "a str"),
        ("capabilities", Capabilities, "a Capabilities"),
        ("requires", Mapping, "a dict"),
    )
    for attribute, kind, wanted in declared:
        given = getattr(backend, attribute, None)
        if not isinstance(given, kind):
            raise RegistryError(
                f"The backend {name} has {a_type(given)} as its `{attribute}`, not {wanted}. Set "
                "it in the class."
            )


def install_line(name: str) -> str:
    """The command that installs the backend `name` and its framework."""
    extra = _FIRST_PARTY_EXTRAS.get(name)
    if extra is None:
        return f"pip install {_provider(name)}"
    return install_command(f"pip install 'polytrain[{extra}]'")


def _entry_points_by_name() -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = defaultdict(list)
    seen = set()
    for entry_point in installed_entry_points(GROUP):
        # An editable install and the checkout it points to can both be on sys.path.
        key = (entry_point.name, entry_point.value, _distribution(entry_point))
        if key not in seen:
            seen.add(key)
            found[entry_point.name].append(entry_point)
    return found


def _the_entry_point(name: str) -> EntryPoint:
    by_name = _entry_points_by_name()
    candidates = by_name.get(name, [])
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        owners = " and ".join(_distribution(candidate) for candidate in candidates)
        raise AmbiguousBackendError(
            f"The backend {name!r} is claimed by {owners}. Uninstall all but one of them."
        )
    raise UnknownBackendError(_unknown(name, tuple(sorted(by_name))))


def _unknown(name: str, installed: tuple[str, ...]) -> str:
    sentence = f"No backend is named {name!r}."
    known = sorted({*installed, *_FIRST_PARTY_EXTRAS})
    if name == "jax" and name not in installed:
        return f"{sentence} docs/jax.md shows how to make one, with a complete example."
    meant = _OTHER_NAMES.get(str(name))
    nearest = [meant] if meant else close_to(name, known)
    if name in _FIRST_PARTY_EXTRAS:
        sentence += f" Install it with: {install_line(name)}."
    elif nearest and nearest[0] in installed:
        sentence += f" Did you mean {nearest[0]!r}?"
    elif nearest:
        sentence += f" Did you mean {nearest[0]!r}? Install it with: {install_line(nearest[0])}."
    return f"{sentence} Installed: {', '.join(installed) or 'none'}."


def _provided(plugin: Any, entry_point: EntryPoint) -> list[Any]:
    """Return what a module provides: classes, if nothing is wrong.

    Raises:
        RegistryError: a hook of the module's is unknown, or raises, or returns no list.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(BackendHooks)
    try:
        manager.register(plugin, name=entry_point.name)
        manager.check_pending()
        return [cls for classes in manager.hook.polytrain_backends() for cls in classes]
    except Exception as error:
        raise RegistryError(
            f"The entry point {entry_point.name!r} of {_distribution(entry_point)} names "
            f"{entry_point.value!r}, whose hooks can't be used ({type(error).__name__}: {error}). "
            "It must be a module with a function polytrain_backends(), marked with @hookimpl, that "
            "returns a list of classes."
        ) from error


def _checked(name: str, entry_point: EntryPoint, provided: list[Any]) -> type[Backend]:
    for cls in provided:
        if isinstance(cls, type) and getattr(cls, "name", None) == name:
            expect_usable(
                cls,
                remedy=f"It is {_distribution(entry_point)}'s. Install matching versions: "
                f"{install_line(name)} --upgrade",
            )
            found: type[Backend] = cls
            return found
    names = ", ".join(map(_shown, provided)) or "none (mark it with @hookimpl, and return a list)"
    raise RegistryError(
        f"The entry point {name!r} of {_distribution(entry_point)} names the module "
        f"{entry_point.value!r}, whose polytrain_backends() provides {names}. "
        f"Provide a class of a backend whose `name` is {name!r}."
    )


def _shown(provided: Any) -> str:
    if isinstance(provided, type):
        return repr(getattr(provided, "name", provided.__name__))
    return f"{a_type(provided)}, which is no class"


def _distribution(entry_point: EntryPoint) -> str:
    distribution = entry_point.dist
    return f"{distribution.name} {distribution.version}" if distribution else entry_point.value


def _provider(name: str) -> str:
    candidates = _entry_points_by_name().get(name, [])
    distribution = candidates[0].dist if candidates else None
    return distribution.name if distribution else name
