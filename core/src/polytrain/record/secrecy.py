"""Values without what is secret by its name: a digest where they are stored, `…` where shown."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from polytrain.functions.code_fingerprint import code_fingerprint
from polytrain.text.secret_names import HIDDEN, is_secret, without_credentials

_ROUNDS = 200_000

Replacement = Callable[[Any], str]
"""Returns what stands for a secret."""

_OPTION = re.compile(r"[-+~]*[A-Za-z_][\w./-]*")
"""What is before `=` in an argument of a program."""


def digests(salt: str) -> Replacement:
    """Return what makes digests of secrets, which are the same for the same salt alone.

    Whoever reads the salt can try values. Each try costs about 50 ms of a CPU, which puts a
    generated key or a good password out of reach, but neither a word nor a few digits.
    """
    return lambda value: _digest(code_fingerprint(value), salt)


def shown(value: Any, name: str = "") -> Any:
    """Return a value for people: with `…` for secrets, and for digests of them."""
    return without_secrets(value, lambda _: HIDDEN, name)


def without_secrets(value: Any, replacement: Replacement, name: str = "") -> Any:
    """Return a value in which others stand for secrets, within dicts, lists and tuples too.

    A secret is a value whose name says so, that of such an option in a list of arguments, and the
    password in an address. None, truth values and what is empty are never secret.

    Args:
        value: any value; an object is left as it is.
    """
    if is_secret(name):
        is_empty = isinstance(value, str | bytes | list | tuple | Mapping) and not value
        if is_empty or value is None or isinstance(value, bool):
            return value
        return replacement(value)
    if isinstance(value, Mapping):
        return {key: without_secrets(each, replacement, str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        items = _items(value, replacement)
        return list(items) if isinstance(value, list) else tuple(items)
    if isinstance(value, str) and without_credentials(value) != value:
        return without_credentials(value, replacement(value))
    return value


def _items(items: Iterable[Any], replacement: Replacement) -> Iterator[Any]:
    """The items of a list, which may be the arguments of a program: `--api-key X`, `api-key=X`."""
    option, is_next = "", False
    for item in items:
        text = item if isinstance(item, str) else ""
        # What comes next is the option's value, whatever it begins with, unless it is an option.
        if text.startswith("--" if is_next else "-"):
            option = ""
        name, equals, value = text.partition("=")
        if option:
            yield without_secrets(item, replacement, option)
        elif equals and _OPTION.fullmatch(name):
            yield f"{name}={without_secrets(value, replacement, name)}"
        else:
            yield without_secrets(item, replacement)
        is_next = not option and text.startswith("-") and not equals and is_secret(text)
        if is_next:
            option = text


@lru_cache
def _digest(text: str, salt: str) -> str:
    # Not scrypt: some hardened builds of OpenSSL lack it.
    digest = hashlib.pbkdf2_hmac("sha256", text.encode(), salt.encode(), _ROUNDS, dklen=16)
    # The colon makes it a password where it stands in an address, so that it isn't shown there.
    return f"pbkdf2:{digest.hex()}"
