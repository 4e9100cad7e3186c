"""The driver half: the options, their checks, and what workers need. Imports no library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from polytrain_plugins import (
    Backend,
    Capabilities,
    Demand,
    Job,
    Problem,
    missing_columns,
    needed_without_function,
    options_beside_function,
)

if TYPE_CHECKING:
    from polytrain_mylib.engine import MylibEngine


@dataclass(frozen=True, kw_only=True)
class Mylib(Backend):
    """A linear model, fitted by gradient descent."""

    name: ClassVar[str] = "mylib"
    contract_version: ClassVar[int] = 1
    capabilities: ClassVar[Capabilities] = Capabilities(
        declarative=True, predictive=True, exact_resume=True
    )
    # Your library: the module, and the command that installs it.
    requires: ClassVar[Mapping[str, str]] = {}
    mutable_on_resume: ClassVar[frozenset[str]] = frozenset({"rounds"})

    rounds: int = 10
    """Gradient steps over all rows."""

    label: str | None = None
    """Column to predict; all others are features."""

    learning_rate: float = 0.1

    @property
    def total_steps(self) -> int:
        return self.rounds

    def problems(self, job: Job) -> Iterable[Problem]:
        if job.has_training_function:
            yield from options_beside_function(self, ("rounds", "label", "learning_rate"))
            return
        yield from needed_without_function(self, label="Name the column to predict")
        yield from missing_columns(job, label=self.label)
        if not self.rounds > 0:
            yield Problem(
                field="rounds", what=f"{self.rounds} is too small", remedy="Give 1 or more"
            )

    def demand(self, job: Job) -> Demand:
        return Demand(
            # It is imported once per node, and so is what it imports: your library.
            preload=("polytrain_mylib.engine",),
            reads_tables=not job.has_training_function,
            # Rank 0 of the collective listens.
            leader_ports=1,
        )

    def engine(self) -> MylibEngine:
        from polytrain_mylib.engine import MylibEngine

        return MylibEngine(self)
