"""Objects that print in one line, however much they hold, and without secrets. Pure."""

from __future__ import annotations

import reprlib
from dataclasses import Field, fields
from typing import Any

from polytrain.text.addresses import without_credentials
from polytrain.text.described import is_default
from polytrain.text.secret_names import HIDDEN, is_secret

_LONGEST = 400
"""Characters between an object's brackets."""


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxdict = self.maxlist = self.maxtuple = 4
        self.maxstring = self.maxother = 200
        self.fillvalue = "…"

    def repr1(self, x: Any, level: int) -> str:
        # Of itself it is short already.
        return repr(x) if isinstance(x, ShortRepr) else super().repr1(x, level)

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(without_credentials(x), level)

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        if level <= 0 and x:
            return "{…}"
        shown = [
            f"{key!r}: {HIDDEN if is_secret(str(key)) else self.repr1(value, level - 1)}"
            for key, value in list(x.items())[: self.maxdict]
        ]
        more = [HIDDEN] if len(x) > self.maxdict else []
        return f"{{{', '.join([*shown, *more])}}}"


_SHORT = _Short()


class ShortRepr:
    """A dataclass whose `repr` has the fields that aren't its defaults, each cut if it is long."""

    __slots__ = ()

    def __repr__(self) -> str:
        given: tuple[Field[Any], ...] = fields(self)  # type: ignore[arg-type]  # all that derive from it are dataclasses
        parts = (
            f"{each.name}={_SHORT.repr(getattr(self, each.name))}"
            for each in given
            if each.repr and not is_default(getattr(self, each.name), each)
        )
        text = ", ".join(parts)
        return f"{type(self).__name__}({text if len(text) <= _LONGEST else text[:_LONGEST] + '…'})"
