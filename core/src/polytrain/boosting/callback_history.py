"""What callbacks have done in a run, for the runs that continue it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True, kw_only=True)
class CallbackHistory:
    """What the user's callbacks have done in a run."""

    callbacks: list[str] = field(default_factory=list)
    """Names of their classes and functions."""

    params: dict[str, Any] = field(default_factory=dict)
    """Parameters that callbacks have set."""

    given: dict[str, str] = field(default_factory=dict)
    """The run's own parameters, by their main names, as text."""

    is_over: bool = False
    """Whether a callback has ended training."""

    def continued_by(
        self, callbacks: Iterable[Any], params: Mapping[str, Any], own_name: Callable[[str], str]
    ) -> None:
        """Note callbacks and parameters of the run that continues, which may be another one.

        Without all of the earlier callbacks, what those have done doesn't count: the run is to
        train by its own parameters. So it is with each parameter that has changed, as
        `FailureConfig.on_rollback` does.

        Args:
            own_name: returns the main name of a parameter, which may be given by another.
        """
        names = sorted({_name_of(each) for each in callbacks})
        if not set(self.callbacks) <= set(names):
            self.params, self.is_over = {}, False
        self.callbacks = names
        # No callback sets a function, and its text would be another in each process.
        texts = {name: str(value) for name, value in params.items() if not callable(value)}
        before, self.given = self.given, {own_name(name): text for name, text in texts.items()}
        self.params = {
            name: value
            for name, value in self.params.items()
            if before.get(own_name(name)) == self.given.get(own_name(name))
        }

    def to_json(self) -> str:
        """Return the history as JSON text; a subclass reads it."""
        # `asdict` would copy each round, at each save.
        return json.dumps({each.name: getattr(self, each.name) for each in fields(self)})


def _name_of(callback: Any) -> str:
    named = callback if hasattr(callback, "__qualname__") else type(callback)
    return f"{named.__module__}.{named.__qualname__}"
