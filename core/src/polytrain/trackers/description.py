"""Describes to a tracker what a run was started with. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from polytrain.record.run_facts import RunFacts

_LEFT_OUT = frozenset(
    {
        # It is there as `num_workers`.
        "scaling_config.num_workers",
        # They say where a run is shown, not how it trains.
        "run_config.callbacks",
        "run_config.observers",
        "run_config.progress",
        "run_config.show_output",
        "run_config.track",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a run was started with, without secrets: plain values, and lists of them."""

    parameters: Mapping[str, Any]
    """The user's hyperparameters, then what was given of the configuration; one level."""

    command: str
    """The driver's command line; empty in a notebook."""

    script: str
    """The driver's Python file; empty if there is none."""

    commit: str
    """The git commit of the driver's code; empty if that is in no repository."""

    branch: str
    environment: Mapping[str, str]
    """What is left: whether the code has changes, versions, machines and devices."""

    @property
    def program(self) -> Mapping[str, str]:
        """All but the parameters, without what is unknown."""
        known = {
            "command": self.command,
            "script": self.script,
            "commit": self.commit,
            "branch": self.branch,
            **self.environment,
        }
        return {name: value for name, value in known.items() if value}


def description_of(facts: RunFacts) -> Description:
    """Return the description of a run."""
    program = facts.program
    has_changes = {None: "", True: "yes", False: "no"}[program.is_dirty]
    return Description(
        parameters=_parameters(facts),
        command=shlex.join(program.command),
        script=program.script,
        commit=program.commit,
        branch=program.branch,
        environment={
            "changes": has_changes,
            "nodes": ", ".join(facts.nodes),
            "devices": ", ".join(f"{count} x {name}" for name, count in facts.devices.items()),
            **{f"version.{name}": version for name, version in program.versions.items()},
        },
    )


def _parameters(facts: RunFacts) -> Mapping[str, Any]:
    found = dict(facts.hyperparameters)
    for name, value in _configured(facts).items():
        # A name that the user has, too, is the user's.
        found[f"polytrain.{name}" if name in found else name] = value
    return found


def _configured(facts: RunFacts) -> Mapping[str, Any]:
    counted = {
        f"datasets.{name}.{key}": known.get(key)
        for name, known in facts.configuration.datasets.items()
        for key in ("rows", "num_columns")
    }
    settings = {name: value for name, value in facts.settings.items() if name not in _LEFT_OUT}
    return {
        "backend": facts.backend,
        "num_workers": facts.num_workers,
        **settings,
        **{name: count for name, count in counted.items() if count is not None},
    }


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return one level as nested dicts: `{"a.b": 1}` is `{"a": {"b": 1}}`.

    A name that begins with that of another value stays as it is.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        *within, last = name.split(".")
        outer = accumulate(within, "{}.{}".format)
        if any(each in values for each in outer):
            found[name] = value
            continue
        place = found
        for each in within:
            place = place.setdefault(each, {})
        place[last] = value
    return found
