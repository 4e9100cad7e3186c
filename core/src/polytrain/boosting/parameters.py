"""Checks of a framework's parameters without importing the framework."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polytrain.text.first_few import numbered
from polytrain_plugins import Job, Problem
from polytrain_plugins.close_names import ALMOST_THE_SAME, did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The names of a framework's parameters, aliases included, and the rules for some of them."""

    framework: str
    """The framework's name, as users know it."""

    known: Collection[str]
    """All parameters."""

    of_the_run: Sequence[tuple[Collection[str], str, str]]
    """Parameters that the run sets: names, meaning and remedy of each."""

    other_framework: str
    translated: Mapping[str, str]
    """The other framework's parameter → this framework's equivalent."""

    whole: Collection[str]
    """Parameters that must be whole numbers."""

    real: Collection[str]
    """Parameters that may be any number."""

    threads: Collection[str]
    """Parameters that set the number of threads."""

    @property
    def names(self) -> set[str]:
        """All names that `problems` handles."""
        of_the_run = (name for names, _, _ in self.of_the_run for name in names)
        return {*self.known, *self.translated, *of_the_run}

    def problems(self, params: Mapping[str, Any], job: Job) -> Iterator[Problem]:
        """Yield the problems of the user's parameters."""
        yield from self._refused(params)
        yield from self._misspelt(params)
        for name, ours in self.translated.items():
            if name in params:
                yield parameter_problem(
                    name,
                    f"it is a parameter of {self.other_framework}",
                    f"Use {self.framework}'s {ours!r}",
                )
        yield from _not_numbers(params, self.whole, int, "a whole number")
        yield from _not_numbers(params, self.real, float, "a number")
        yield from self._too_many_threads(params, job)

    def _refused(self, params: Mapping[str, Any]) -> Iterator[Problem]:
        for names, meaning, remedy in self.of_the_run:
            for name in names:
                if name in params:
                    yield parameter_problem(name, f"it is {meaning}", remedy)

    def _misspelt(self, params: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield unknown parameters whose names are close to a known one.

        Other unknown names may belong to a newer version or to the user's objective. The framework
        itself warns of parameters that it doesn't use.
        """
        known = self.names
        for name in params:
            meant = did_you_mean(name, known, cutoff=ALMOST_THE_SAME)
            if meant and name not in known:
                yield parameter_problem(
                    name,
                    f"{self.framework} has no parameter of this name, and would ignore it",
                    meant.strip(),
                )

    def _too_many_threads(self, params: Mapping[str, Any], job: Job) -> Iterator[Problem]:
        for name in self.threads:
            threads = params.get(name)
            if isinstance(threads, int) and threads > job.cpus_per_worker:
                cpus = numbered(job.cpus_per_worker, "CPU")
                yield parameter_problem(
                    name,
                    f"{threads} threads are more than a worker's {cpus}",
                    "Leave it out; ScalingConfig(resources_per_worker={'CPU': …}) sets it",
                )


def parameter_problem(name: str, what: str, remedy: str) -> Problem:
    """Return the problem of a parameter."""
    return Problem(field=f"params[{name!r}]", what=what, remedy=remedy)


def needed_by_objective(objective: str, field: str, remedy: str) -> Problem:
    """Return the problem of a missing argument that an objective needs."""
    return Problem(field=field, what=f"the objective {objective!r} needs it", remedy=remedy)


def _not_numbers(
    params: Mapping[str, Any], names: Iterable[str], kind: type[int] | type[float], what: str
) -> Iterator[Problem]:
    for name in names:
        if params.get(name) is None:
            continue
        # Frameworks read all parameters from text.
        try:
            kind(str(params[name]))
        except ValueError:
            yield parameter_problem(
                name, f"{params[name]!r} is not {what}", f"Give {what}, or leave it out"
            )
