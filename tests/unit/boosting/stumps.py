"""A booster without a framework."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from polytrain.boosting.booster import Booster
from polytrain.boosting.problems import Parameters
from polytrain_plugins import Capabilities, Job, Problem

PARAMETERS = Parameters(
    framework="Stumps",
    known=("depth", "rate", "workers"),
    of_the_run=[(("rounds", "steps"), "the number of rounds", "Use num_boost_round")],
    other_framework="Forests",
    translated={"eta": "rate"},
    whole=("depth",),
    real=("rate",),
    ranges={},
    threads=("workers",),
)


@dataclass(frozen=True, kw_only=True)
class Stumps(Booster):
    """Its own names for what all boosters have."""

    name: ClassVar[str] = "stumps"
    contract_version: ClassVar[int] = 1
    capabilities: ClassVar[Capabilities] = Capabilities(declarative=True)
    score_option: ClassVar[str] = "begin"
    query_option: ClassVar[str] = "search"
    model_option: ClassVar[str] = "model"
    forbidden_in_names: ClassVar[str] = "#"
    constraint_params: ClassVar[tuple[str, ...]] = ("signs",)
    preload: ClassVar[tuple[str, ...]] = ("stumps",)

    begin: str | None = None
    search: str | None = None
    model: Any = None
    loud: bool = False

    @property
    def seed(self) -> int:
        return 0

    def parameter_problems(self, job: Job) -> Iterable[Problem]:
        yield from PARAMETERS.problems(self.params, job)

    def other_problems(self, job: Job) -> Iterable[Problem]:
        if self.loud:
            yield Problem(field="loud", what="it is loud", remedy="Be quiet")

    def engine(self) -> Any:
        raise NotImplementedError
