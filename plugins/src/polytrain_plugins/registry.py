"""Finds backends: names come from metadata, and only the requested one is imported."""

from __future__ import annotations

from collections import defaultdict
from importlib.metadata import EntryPoint

import pluggy

from polytrain_plugins.backend import CONTRACT_VERSION, Backend
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
        RegistryError: its module doesn't provide the backend that its metadata names.
    """
    entry_point = _the_entry_point(name)
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(BackendHooks)
    try:
        plugin = entry_point.load()
    except Exception as error:
        raise BackendImportError(
            f"The backend {name!r} of {_distribution(entry_point)} can't be imported "
            f"({type(error).__name__}: {error}). Reinstall it with: {install_line(name)}"
        ) from error
    manager.register(plugin, name=name)
    manager.check_pending()
    provided = [cls for classes in manager.hook.polytrain_backends() for cls in classes]
    return _checked(name, entry_point, provided)


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


def _checked(name: str, entry_point: EntryPoint, provided: list[type[Backend]]) -> type[Backend]:
    for cls in provided:
        if getattr(cls, "name", None) != name:
            continue
        version = getattr(cls, "contract_version", None)
        if version != CONTRACT_VERSION:
            raise ContractVersionError(
                f"The backend {name!r} of {_distribution(entry_point)} was written for version "
                f"{version} of the backend contract; this is version {CONTRACT_VERSION}. "
                f"Install matching versions: {install_line(name)} --upgrade"
            )
        return cls
    names = ", ".join(repr(getattr(cls, "name", cls.__name__)) for cls in provided) or "none"
    raise RegistryError(
        f"The entry point {name!r} of {_distribution(entry_point)} names the module "
        f"{entry_point.value!r}, whose polytrain_backends() provides {names}. "
        f"Provide a backend whose `name` is {name!r}."
    )


def _distribution(entry_point: EntryPoint) -> str:
    distribution = entry_point.dist
    return f"{distribution.name} {distribution.version}" if distribution else entry_point.value


def _provider(name: str) -> str:
    candidates = _entry_points_by_name().get(name, [])
    distribution = candidates[0].dist if candidates else None
    return distribution.name if distribution else name
