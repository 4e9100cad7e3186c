"""Counts the places that a training function passes, from `Trainer` to the call in its worker.

    python tests/benchmarks/function_stays.py

A run trains inline with the reference backend, and a profiler looks at each call of polytrain's
code. It counts

- places: functions of polytrain with a parameter that is the training function itself, and classes
  with a field that is, each once;
- calls of these functions with it;
- calls of functions with a parameter that has the function in one of its fields.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import fields, is_dataclass
from types import CodeType, FrameType
from typing import Any

import polytrain

PACKAGES = ("polytrain", "polytrain_plugins")


def train(config: dict[str, Any]) -> None:
    """Report a step."""
    polytrain.report({"loss": 1.0})


class Stays:
    """A profiler that notes who gets an object."""

    def __init__(self, followed: Any) -> None:
        self._followed = followed
        self._parameters: dict[tuple[CodeType, str], str] = {}
        self._fields: set[str] = set()
        self.calls = 0
        self.calls_with_owner = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(PACKAGES):
            return
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount
        names = code.co_varnames[: count + bool(code.co_flags & 4) + bool(code.co_flags & 8)]
        for name in names:
            value = frame.f_locals.get(name)
            if value is self._followed or (
                isinstance(value, dict | tuple) and self._followed in _values(value)
            ):
                self._parameters[code, name] = f"{module}.{code.co_qualname}({name})"
                self.calls += 1
            elif is_dataclass(value):
                for each in fields(value):
                    if getattr(value, each.name, None) is self._followed:
                        self._fields.add(f"{type(value).__qualname__}.{each.name}")
                        self.calls_with_owner += 1

    def places(self) -> list[str]:
        """Return the functions, then the fields."""
        return [*sorted(self._parameters.values()), *sorted(self._fields)]


def _values(value: Any) -> list[Any]:
    found = value.values() if isinstance(value, dict) else value
    return [each for each in found if callable(each)]


def main() -> None:
    """Run, and print the places."""
    with tempfile.TemporaryDirectory() as place:
        stays = Stays(train)
        sys.setprofile(stays)
        try:
            polytrain.make_trainer(
                "reference",
                train,
                train_loop_config={},
                scaling_config=polytrain.ScalingConfig(num_workers=0),
                run_config=polytrain.RunConfig(storage_path=place, progress=False),
            ).fit()
        finally:
            sys.setprofile(None)
    places = stays.places()
    print("\n".join(places))
    calls = f"{stays.calls} calls with it, {stays.calls_with_owner} with its owner"
    print(f"{len(places)} places, {calls}")


if __name__ == "__main__":
    main()
