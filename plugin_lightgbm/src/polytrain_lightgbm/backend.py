"""The driver half: the options of `lightgbm.train`, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from polytrain import get_context
from polytrain_plugins import (
    Backend,
    Capabilities,
    Demand,
    Job,
    Problem,
    missing_columns,
    missing_label,
    not_a_count,
    not_a_mapping,
    options_beside_function,
    patience_problems,
)

if TYPE_CHECKING:
    from polytrain_lightgbm.engine import LightGBMEngine

# What the run itself decides, with LightGBM's aliases: parameters, why, and what to do instead.
_OURS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("num_machines", "num_machine"),
        "the number of workers",
        "Leave it out; ScalingConfig(num_workers=…) says it",
    ),
    (
        (
            *("machines", "workers", "nodes", "local_listen_port", "local_port", "port"),
            *("machine_list_filename", "machine_list_file", "machine_list", "mlist"),
        ),
        "an address of the workers, known only once they run",
        "Leave it out",
    ),
    (
        ("pre_partition", "is_pre_partition"),
        "how the rows are split, which is decided for the run as a whole",
        "Leave it out",
    ),
    (
        ("early_stopping_round", "early_stopping_rounds", "early_stopping", "n_iter_no_change"),
        "a rule that all workers must follow in the same round",
        "Use the option early_stopping_rounds",
    ),
    (
        (
            *("num_iterations", "num_iteration", "n_iter", "num_tree", "num_trees", "num_round"),
            *("num_rounds", "nrounds", "num_boost_round", "n_estimators", "max_iter"),
        ),
        "the number of rounds, restarts included",
        "Use the option num_boost_round",
    ),
)
_TREE_LEARNER = ("tree_learner", "tree", "tree_type", "tree_learner_type")
_REFUSED_LEARNERS = {
    "serial": "each worker would train a model of its own on its part of the rows",
    "feature": "it needs all rows on every worker, and LightGBM's library refuses it here",
    "voting": "LightGBM then ends in different models on different workers",
}


def network_params() -> dict[str, Any]:
    """Parameters for `lightgbm.train` inside a training function: one model on all workers' rows.

    The network itself is up already when the function is called.

    Raises:
        NotInTrainerError: outside a training function.
    """
    return parallel_params(get_context().get_world_size())


def parallel_params(world_size: int) -> dict[str, Any]:
    """What makes LightGBM train with the other ranks; nothing in a world of one."""
    if world_size == 1:
        return {}
    return {"tree_learner": "data", "num_machines": world_size, "pre_partition": True}


_DECLARATIVE = ("params", "num_boost_round", "label", "weight", "group", "early_stopping_rounds")


@dataclass(frozen=True, kw_only=True)
class LightGBM(Backend):
    """Gradient boosted trees by LightGBM.

    With a training function the network is up when it is called: `lightgbm.train` on the worker's
    shard, with `network_params()` added to its parameters, trains one model with all others, and
    the options here stay unset.
    """

    name: ClassVar[str] = "lightgbm"
    contract_version: ClassVar[int] = 1
    capabilities: ClassVar[Capabilities] = Capabilities(declarative=True)
    requires: ClassVar[dict[str, str]] = {"lightgbm": "pip install 'polytrain[lightgbm]'"}
    changeable: ClassVar[frozenset[str]] = frozenset({"num_boost_round"})

    params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters, as for `lightgbm.train`. `num_threads` is the worker's CPUs by default."""

    num_boost_round: int = 10
    """Boosting rounds in all, those before a restart included."""

    label: str | None = None
    """Column to predict."""

    weight: str | None = None
    """Column with the weights of the rows."""

    group: str | None = None
    """Column that tells the query of a row, for ranking. The rows of a query lie together, and
    stay on one worker. All other columns are features."""

    early_stopping_rounds: int | None = None
    """Stop when a metric of a data set besides "train" hasn't improved for so many rounds."""

    def problems(self, job: Job) -> Iterable[Problem]:
        if job.has_training_function:
            yield from options_beside_function(self, _DECLARATIVE)
            return
        yield from not_a_mapping(params=self.params)
        yield from not_a_count(num_boost_round=self.num_boost_round)
        yield from patience_problems(job, early_stopping_rounds=self.early_stopping_rounds)
        yield from self._parameter_problems(job)
        yield from missing_label(self.label)
        yield from missing_columns(job, label=self.label, weight=self.weight, group=self.group)

    def demand(self, job: Job) -> Demand:
        return Demand(
            preload=("lightgbm", "polytrain_lightgbm.engine"),
            reads_tables=True,
            group=self.group,
            # A metric such as AUC can't be put together from shards: every rank evaluates all rows.
            whole_datasets=frozenset()
            if job.has_training_function
            else frozenset(job.datasets) - {"train"},
        )

    def engine(self) -> LightGBMEngine:
        from polytrain_lightgbm.engine import LightGBMEngine

        return LightGBMEngine(self)

    def _parameter_problems(self, job: Job) -> Iterable[Problem]:
        if not isinstance(self.params, Mapping):
            return
        for aliases, meaning, remedy in _OURS:
            for alias in aliases:
                if alias in self.params:
                    yield Problem(
                        field=f"params[{alias!r}]", what=f"it is {meaning}", remedy=remedy
                    )
        for alias in _TREE_LEARNER:
            learner = str(self.params.get(alias)).removesuffix("_parallel")
            if learner in _REFUSED_LEARNERS and job.num_workers > 1:
                yield Problem(
                    field=f"params[{alias!r}]",
                    what=f"{learner!r} can't be used by {job.num_workers} workers: "
                    f"{_REFUSED_LEARNERS[learner]}",
                    remedy="Leave it out to get 'data', or use num_workers=1",
                )
