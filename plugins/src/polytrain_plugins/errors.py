"""Errors of the contract.

    PolytrainError
    ├── RegistryError                 the backend of this name can't be loaded
    │   ├── UnknownBackendError
    │   ├── AmbiguousBackendError     two distributions claim the name
    │   ├── BackendImportError        the plugin's own import failed; the cause is kept
    │   └── ContractVersionError      written for another version of the contract
    ├── InvalidJobError               (ValueError) the job can't run; lists every problem
    ├── UnsupportedCapabilityError    the backend doesn't promise this
    └── …                             `polytrain.errors` has those of a run

All of them survive pickling.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong with a job."""

    field: str
    """The argument, as the user writes it."""

    what: str
    """What is wrong with it, with the value."""

    remedy: str
    """What to write instead."""

    def __str__(self) -> str:
        end = "" if self.what.endswith(("?", ".")) else "."
        return f"{self.field}: {self.what}{end} {self.remedy}"


_LONGEST = 200
"""Characters of an error in its `repr`."""


class PolytrainError(Exception):
    """The root of every error that polytrain raises on purpose."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self).partition(chr(10))[0][:_LONGEST]!r})"


class RegistryError(PolytrainError):
    """The backend of this name can't be loaded."""


class UnknownBackendError(RegistryError):
    """No installed distribution provides a backend of this name."""


class AmbiguousBackendError(RegistryError):
    """Two installed distributions provide a backend of this name."""


class BackendImportError(RegistryError):
    """The plugin that provides the backend can't be imported. `__cause__` says why."""


class ContractVersionError(RegistryError):
    """The backend was written for another version of the contract."""


class InvalidJobError(PolytrainError, ValueError):
    """The job can't run. No worker was started."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        return f"{count}; nothing was started:\n{lines}"


class UnsupportedCapabilityError(PolytrainError):
    """The backend doesn't declare the requested capability."""
