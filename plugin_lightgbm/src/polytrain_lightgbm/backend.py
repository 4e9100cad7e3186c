"""The driver half: the options of `lightgbm.train`, and what is wrong with them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from polytrain import get_context
from polytrain_lightgbm.names import FORBIDDEN, name_problems
from polytrain_lightgbm.objectives import objective_problems
from polytrain_lightgbm.parameters import (
    ROW_DRAWS,
    gpu_problems,
    parallel_params,
    parameter_names,
    parameter_problems,
    value,
    without,
)
from polytrain_plugins import (
    Backend,
    Capabilities,
    Demand,
    Job,
    Problem,
    categorical_problems,
    constraint_problems,
    feature_problems,
    missing_columns,
    missing_label,
    model_problems,
    not_a_count,
    not_a_mapping,
    not_column_names,
    number_problems,
    options_beside_function,
    patience_problems,
    sample_problems,
)

if TYPE_CHECKING:
    from polytrain_lightgbm.engine import LightGBMEngine


def network_params() -> dict[str, Any]:
    """Parameters for `lightgbm.train` inside a training function: one model on all workers' rows.

    The network itself is up already when the function is called.

    Raises:
        NotInTrainerError: outside a training function.
    """
    return parallel_params(get_context().get_world_size())


_DECLARATIVE = (
    *("params", "num_boost_round", "label", "weight", "init_score", "group", "categorical"),
    *("eval_train", "early_stopping_rounds", "feval", "callbacks", "init_model"),
    "bin_sample_rows",
)


@dataclass(frozen=True, kw_only=True)
class LightGBM(Backend):
    """Gradient boosted trees by LightGBM.

    With a training function the network is up when it is called: `lightgbm.train` on the worker's
    shard, with `network_params()` added to its parameters, trains one model with all others, and
    the options here stay unset.
    """

    name: ClassVar[str] = "lightgbm"
    contract_version: ClassVar[int] = 1
    capabilities: ClassVar[Capabilities] = Capabilities(
        declarative=True, predictive=True, exact_resume=True, exact_scaling=True
    )
    requires: ClassVar[dict[str, str]] = {"lightgbm": "pip install 'polytrain[lightgbm]'"}
    mutable_on_resume: ClassVar[frozenset[str]] = frozenset({"num_boost_round"})

    params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters, as for `lightgbm.train`. `num_threads` is the worker's CPUs by default."""

    num_boost_round: int = 10
    """Boosting rounds in all, those before a restart included."""

    label: str | None = None
    """Column to predict."""

    weight: str | None = None
    """Column with the weights of the rows."""

    init_score: str | None = None
    """Column with the score that each row begins with."""

    group: str | None = None
    """Column that tells the query of a row, for ranking. The rows of a query lie together, and
    stay on one worker. All other columns are features."""

    categorical: Sequence[str] = ()
    """Features that are categories although they are numbers. Strings always are, and columns of
    pandas' type `category`."""

    eval_train: bool = True
    """Whether the metrics of the rows that are trained on are reported too."""

    early_stopping_rounds: int | None = None
    """Stop when a metric of a data set besides "train" hasn't improved for so many rounds."""

    feval: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None
    """Metrics of one's own, as for `lightgbm.train`."""

    callbacks: Sequence[Callable[..., Any]] = ()
    """Callbacks as for `lightgbm.train`, called by every worker. One that changes the booster does
    so before a round, as `lightgbm.reset_parameter` does."""

    init_model: Any = None
    """A `lightgbm.Booster`, or the path of its file on every node, to whose
    trees `num_boost_round` are added."""

    bin_sample_rows: int = 200_000
    """Rows, of all workers together, from which the bins are made that every worker takes. In what
    order the rows of a data set are that has no more makes no difference."""

    @property
    def columns_besides_features(self) -> tuple[str, ...]:
        """The columns that something else is in."""
        others = (self.label, self.weight, self.init_score, self.group)
        return tuple(dict.fromkeys(column for column in others if column is not None))

    @property
    def seed(self) -> int:
        """Of all that is drawn."""
        return int(value(self.params, "seed", 0))

    @property
    def objective(self) -> Any:
        """A name, or the user's own function."""
        return value(self.params, "objective", "regression")

    @property
    def draws_rows(self) -> bool:
        """Whether rounds see a part of the rows that is drawn here, and not by LightGBM."""
        if self._boosting != "gbdt" and self._boosting != "dart":
            return False
        if self.params.get("data_sample_strategy", "bagging") != "bagging":
            return False
        fractions = ("bagging_fraction", "pos_bagging_fraction", "neg_bagging_fraction")
        drawn = any(float(value(self.params, name, 1)) < 1 for name in fractions)
        return drawn and int(value(self.params, "bagging_freq", 0)) > 0

    @property
    def begins_with_a_score(self) -> bool:
        """Whether LightGBM looks for a score that a run without trees begins with."""
        return (
            self.init_score is None
            and self.params.get("boost_from_average", True)
            and not callable(self.objective)
            and self._boosting != "rf"
        )

    @property
    def needs_all_rounds(self) -> bool:
        """Whether a restart begins with the first round.

        DART drops no trees from before it, and a random forest takes no scores to begin with.
        """
        return self._boosting in ("dart", "rf")

    def booster_params(self, threads: int) -> dict[str, Any]:
        """The parameters but for those of the network, and for what is drawn here."""
        left_out = ("objective", "tree_learner", *(ROW_DRAWS if self.draws_rows else ()))
        params = without(self.params, left_out)
        objective = "none" if callable(self.objective) else self.objective
        # By whichever of LightGBM's names they are given.
        defaults = {"num_threads": threads, "verbosity": -1}
        told = {name: each for name, each in defaults.items() if value(params, name) is None}
        return {**params, **told, "objective": objective}

    @property
    def reported_params(self) -> dict[str, Any]:
        """What the model is to say of the parameters that a run changes."""
        defaults = {"num_threads": 0, "verbosity": 1, "bagging_fraction": 1.0, "bagging_freq": 0}
        told = {name: value(self.params, name, default) for name, default in defaults.items()}
        for name, default in {
            "boost_from_average": True,
            "bin_construct_sample_cnt": 200_000,
        }.items():
            told[name] = self.params.get(name, default)
        return {**told, "num_iterations": self.num_boost_round}

    def for_a_second_machine(self) -> LightGBM:
        """The options of a machine beside the one that does what others see."""
        needed = [each for each in self.callbacks if getattr(each, "before_iteration", False)]
        return replace(self, callbacks=copy.deepcopy(needed))

    @property
    def _boosting(self) -> str:
        names = {"gbrt": "gbdt", "random_forest": "rf"}
        boosting = str(value(self.params, "boosting", "gbdt"))
        return names.get(boosting, boosting)

    def problems(self, job: Job) -> Iterable[Problem]:
        yield from gpu_problems(job)
        if job.has_training_function:
            yield from options_beside_function(self, _DECLARATIVE)
            return
        not_names = tuple(
            not_column_names(
                label=self.label, weight=self.weight, init_score=self.init_score, group=self.group
            )
        )
        if not_names:
            yield from not_names
            return
        yield from not_a_mapping(params=self.params)
        if isinstance(self.params, Mapping):
            yield from parameter_problems(self.params, job)
            yield from objective_problems(self.params, self.group)
            constraints = parameter_names("monotone_constraints")
            yield from constraint_problems(
                job, self.columns_besides_features, self.params, *constraints
            )
        yield from not_a_count(num_boost_round=self.num_boost_round)
        yield from patience_problems(job, early_stopping_rounds=self.early_stopping_rounds)
        yield from missing_label(self.label)
        yield from missing_columns(
            job,
            label=self.label,
            weight=self.weight,
            init_score=self.init_score,
            group=self.group,
        )
        yield from categorical_problems(job, self.categorical, self.columns_besides_features)
        yield from number_problems(
            job, label=self.label, weight=self.weight, init_score=self.init_score
        )
        besides = self.columns_besides_features
        yield from feature_problems(job, besides, categorical=self.categorical, forbidden=FORBIDDEN)
        yield from name_problems(job, besides)
        yield from sample_problems(bin_sample_rows=self.bin_sample_rows)
        yield from model_problems("lightgbm", init_model=self.init_model)
        if self.init_model is not None and self._boosting == "rf":
            yield Problem(
                field="init_model",
                what="LightGBM adds no trees to a model with boosting='rf'",
                remedy="Leave it out, or use another boosting",
            )
        for callback in self.callbacks:
            if type(callback).__name__ == "_EarlyStoppingCallback":
                yield Problem(
                    field="callbacks",
                    what="lightgbm.early_stopping forgets what it has seen when a run is restarted",
                    remedy="Use the option early_stopping_rounds",
                )

    def demand(self, job: Job) -> Demand:
        return Demand(
            preload=("lightgbm", "polytrain_lightgbm.engine"),
            reads_tables=True,
            group=self.group,
            # A metric such as AUC can't be put together from shards: one rank evaluates all rows.
            whole_datasets=frozenset()
            if job.has_training_function
            else frozenset(job.datasets) - {"train"},
        )

    def engine(self) -> LightGBMEngine:
        from polytrain_lightgbm.engine import LightGBMEngine

        return LightGBMEngine(self)
