"""Addresses of storages and servers, without the secrets in them. Pure."""

from __future__ import annotations

import re

from polytrain.text.secret_names import is_secret

ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)


def holds_credentials(location: str) -> bool:
    """Return whether an address contains a password, which would end up in logs."""
    return without_credentials(location) != location


def without_credentials(location: str, mark: str = "…") -> str:
    """Return the address for display, with `mark` in place of passwords and secrets."""
    found = ADDRESS.match(location)
    if found is None:
        return location
    rest, question, options = found["rest"].partition("?")
    end = _end_of_password(rest)
    shown = "&".join(_without_secret(option, mark) for option in options.split("&"))
    return f"{found['scheme']}://{mark if end else ''}{rest[end:]}{question}{shown}"


def _without_secret(option: str, mark: str) -> str:
    name, equals, _ = option.partition("=")
    is_signature = name == "sig" or name.lower().endswith("signature")
    return f"{name}={mark}" if equals and (is_signature or is_secret(name)) else option


def _end_of_password(rest: str) -> int:
    """Return the length of the user and password after the scheme; 0 if there are none."""
    authority, _, path = rest.partition("/")
    user, at, _ = authority.rpartition("@")
    if at:
        return len(user) if ":" in user else 0
    # A slash in a password should be written as %2F, but not everybody does.
    _, colon, port = authority.partition(":")
    is_port = port.isdigit() or authority.startswith("[")
    return rest.rindex("@") if colon and not is_port and "@" in path else 0
