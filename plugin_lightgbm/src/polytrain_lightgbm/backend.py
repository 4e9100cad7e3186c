"""The driver half: the options of `lightgbm.train`, and their checks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from polytrain import get_context
from polytrain.boosting.booster import Booster
from polytrain.boosting.problems import COLUMN, parameter_problem, score_problems
from polytrain_lightgbm.names import FORBIDDEN, name_problems
from polytrain_lightgbm.objectives import (
    PERCENTILES,
    has_several_outputs,
    objective_of,
    objective_problems,
)
from polytrain_lightgbm.parameters import (
    OF_PREDICTIONS,
    PARAMETERS_OF_FEATURES,
    ROW_DRAWS,
    boosting_of,
    gpu_problems,
    is_true,
    parallel_params,
    parameter_problems,
    sets_something,
    strategy_of,
    value,
    without,
)
from polytrain_lightgbm.private import is_early_stopping
from polytrain_plugins import Capabilities, DatasetInfo, Demand, Job, Problem, unknown_name

if TYPE_CHECKING:
    from polytrain_lightgbm.engine import LightGBMEngine


_REFUSED_BY_FORESTS = {
    "init_model": "adds no trees to a model",
    "init_score": "takes no initial scores",
}
"""Option that can't be used with random forests → what LightGBM doesn't do."""


_OF_PREDICT = (
    *("start_iteration", "num_iteration", "raw_score", "pred_leaf", "pred_contrib"),
    *("validate_features", *OF_PREDICTIONS),
)


def network_params() -> dict[str, Any]:
    """Return parameters for `lightgbm.train` to fit one model on all workers' rows.

    Call it in a training function. The network is connected before that function starts.

    Raises:
        NotInWorkerError: outside a training function.
    """
    return parallel_params(get_context().get_world_size())


@dataclass(frozen=True, kw_only=True)
class LightGBM(Booster):
    """Gradient boosted trees by LightGBM.

    A training function runs with the network connected: `lightgbm.train` on each worker's shard,
    with `network_params()` in its parameters, trains one model together. The options here then
    stay unset.

    In `params`, `num_threads` defaults to the worker's CPUs. A callback that changes the booster
    must do so before a round, as `lightgbm.reset_parameter` does. It may change the fractions of
    bagging if `params` set `bagging_freq` and a fraction below 1.
    """

    name: ClassVar[str] = "lightgbm"
    contract_version: ClassVar[int] = 1
    capabilities: ClassVar[Capabilities] = Capabilities(
        declarative=True, predictive=True, exact_resume=True, exact_scaling=True
    )
    requires: ClassVar[dict[str, str]] = {"lightgbm": "pip install 'polytrain[lightgbm]'"}
    score_option: ClassVar[str] = "init_score"
    query_option: ClassVar[str] = "group"
    model_option: ClassVar[str] = "init_model"
    forbidden_in_names: ClassVar[str] = FORBIDDEN
    constraint_params: ClassVar[tuple[str, ...]] = PARAMETERS_OF_FEATURES
    preload: ClassVar[tuple[str, ...]] = ("lightgbm", "polytrain_lightgbm.engine")

    init_score: Annotated[str | None, COLUMN] = None
    """Column with each row's initial score."""

    group: Annotated[str | None, COLUMN] = None
    """Column with the query of each row, for ranking. Rows of a query must be consecutive, and
    stay on one worker. All other columns are features."""

    feval: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None
    """Your own metrics, as for `lightgbm.train`."""

    init_model: Any = None
    """A model to continue with `num_boost_round` more rounds: a `lightgbm.Booster`, or the path of
    its file on every node."""

    @property
    def seed(self) -> int:
        """Seed of all random draws."""
        return int(value(self.params, "seed", 0))

    @property
    def objective(self) -> Any:
        """The objective: a name, or the user's function."""
        return value(self.params, "objective", "regression")

    @property
    def draws_rows(self) -> bool:
        """Whether this package, not LightGBM, draws the rows of a round."""
        if self._boosting != "gbdt" and self._boosting != "dart":
            return False
        if strategy_of(self.params) != "bagging":
            return False
        fractions = ["bagging_fraction"]
        if self.may_draw_by_label:
            fractions += ["pos_bagging_fraction", "neg_bagging_fraction"]
        drawn = any(float(value(self.params, name, 1)) < 1 for name in fractions)
        return drawn and int(value(self.params, "bagging_freq", 0)) > 0

    @property
    def may_draw_by_label(self) -> bool:
        """Whether LightGBM uses the fractions of positive and of negative rows."""
        return objective_of(self.params) == "binary"

    @property
    def begins_with_a_score(self) -> bool:
        """Whether LightGBM estimates the initial score of a run without trees."""
        return (
            self.init_score is None
            and is_true(self.params, "boost_from_average", default=True)
            and not callable(self.objective)
            and self._boosting != "rf"
        )

    @property
    def renews_leaves(self) -> bool:
        """Whether this package computes the leaf values, from all workers' residuals."""
        return objective_of(self.params) in PERCENTILES and not self.averages_leaves

    @property
    def averages_leaves(self) -> str | None:
        """The parameter that makes LightGBM average percentile leaves over the workers, or None."""
        if objective_of(self.params) not in PERCENTILES:
            return None
        others = {
            "boosting": self._boosting != "gbdt",
            "data_sample_strategy": strategy_of(self.params) != "bagging",
            "reg_sqrt": is_true(self.params, "reg_sqrt"),
            "use_quantized_grad": is_true(self.params, "use_quantized_grad"),
        }
        return next((name for name, is_set in others.items() if is_set), None)

    @property
    def ignores_patience(self) -> bool:
        """Whether `early_stopping_rounds` is set, and LightGBM doesn't stop early."""
        return self.early_stopping_rounds is not None and self._boosting == "dart"

    @property
    def needs_all_rounds(self) -> bool:
        """Whether a restart repeats all rounds.

        DART can't drop the trees of a loaded model. A random forest takes no initial scores. With
        penalties for new features, LightGBM forgets which features a loaded model uses.
        """
        penalties = ("cegb_penalty_feature_coupled", "cegb_penalty_feature_lazy")
        return self._boosting in ("dart", "rf") or any(
            sets_something(self.params.get(each)) for each in penalties
        )

    def booster_params(self, threads: int) -> dict[str, Any]:
        """Return LightGBM's parameters, except the network's and those of rows drawn here."""
        left_out = ("objective", "tree_learner", *(ROW_DRAWS if self.draws_rows else ()))
        params = without(self.params, left_out)
        objective = "none" if callable(self.objective) else self.objective
        # `value` also finds a parameter by its aliases.
        defaults = {"num_threads": threads, "verbosity": -1}
        unset = {name: each for name, each in defaults.items() if value(params, name) is None}
        return {**params, **unset, "objective": objective}

    @property
    def reported_params(self) -> dict[str, Any]:
        """The user's values of the parameters that a run changes, to write into the model."""
        defaults = {"num_threads": 0, "verbosity": 1, "bagging_fraction": 1.0, "bagging_freq": 0}
        reported = {name: value(self.params, name, default) for name, default in defaults.items()}
        for name, default in {
            "boost_from_average": True,
            "bin_construct_sample_cnt": 200_000,
        }.items():
            reported[name] = self.params.get(name, default)
        return {**reported, "num_iterations": self.num_boost_round}

    def for_a_second_machine(self) -> LightGBM:
        """Return options for the second machine: it runs only callbacks that precede a round."""
        needed = [each for each in self.callbacks if getattr(each, "before_iteration", False)]
        return replace(self, callbacks=copy.deepcopy(needed))

    @property
    def _boosting(self) -> str:
        return boosting_of(self.params)

    def problems(self, job: Job) -> Iterable[Problem]:
        yield from gpu_problems(job)
        yield from super().problems(job)

    def parameter_problems(self, job: Job) -> Iterable[Problem]:
        yield from parameter_problems(self.params, job)
        yield from objective_problems(self.params, self.group)

    def callback_problems(self) -> Iterable[Problem]:
        for callback in self.callbacks:
            if is_early_stopping(callback):
                yield Problem(
                    field="callbacks",
                    what="lightgbm.early_stopping loses its state when a run restarts",
                    remedy="Use the option early_stopping_rounds",
                )

    def other_problems(self, job: Job) -> Iterable[Problem]:
        yield from name_problems(job, self.columns_besides_features)
        if isinstance(self.params, Mapping):
            several = has_several_outputs(self.params)
            yield from score_problems("init_score", self.init_score, has_several=several)
            yield from self._weight_problems()
        for option, what in _REFUSED_BY_FORESTS.items():
            if getattr(self, option) is not None and self._boosting == "rf":
                yield Problem(
                    field=option,
                    what=f"LightGBM {what} with boosting='rf'",
                    remedy="Leave it out, or use another boosting",
                )
        metrics = self.feval if isinstance(self.feval, list | tuple) else [self.feval]
        if not all(each is None or callable(each) for each in metrics):
            yield Problem(
                field="feval",
                what=f"{self.feval!r} is not a function, nor a list of functions",
                remedy="Name LightGBM's own metrics in params, as 'metric'",
            )

    def _weight_problems(self) -> Iterator[Problem]:
        """Yield a problem if the objective can't use the weights that rows have."""
        objective, draws_rows = objective_of(self.params), False
        # A value that isn't a number is reported by itself.
        with suppress(TypeError, ValueError):
            draws_rows = self.draws_rows
        if objective == "cross_entropy_lambda" and draws_rows:
            yield parameter_problem(
                "objective",
                f"{objective!r} can't be used with bagging: rows that aren't drawn weigh nothing, "
                "and it divides by weights",
                "Leave bagging out, or use 'cross_entropy'",
            )
        # With GOSS, rows differ in any case, and LightGBM takes each row's own weight.
        if objective != "mape" or "goss" in (self._boosting, strategy_of(self.params)):
            return
        differing = "the option weight" if self.weight is not None else None
        if differing is None and draws_rows:
            differing = "bagging, by which rows that aren't drawn weigh nothing"
        if differing is not None:
            yield parameter_problem(
                "objective",
                "with 'mape', LightGBM takes the weight of a worker's first row for that of all "
                f"its rows when it chooses splits, and with {differing}, rows differ",
                "Use 'l1' with weight=…, a column with each row's weight divided by "
                "max(1, abs(label)): that is the same loss",
            )

    def prediction_problems(
        self, options: Mapping[str, Any], data: DatasetInfo
    ) -> Iterable[Problem]:
        for name in options:
            yield from unknown_name(name, name, _OF_PREDICT, "the arguments of Booster.predict")

    def demand(self, job: Job) -> Demand:
        # One rank that trains by itself is two machines of a network, and needs as many ports.
        is_connected = job.num_workers > 1 or not job.has_training_function
        ports = int(is_connected)
        return replace(super().demand(job), ports=ports, leader_ports=ports)

    def engine(self) -> LightGBMEngine:
        from polytrain_lightgbm.engine import LightGBMEngine

        return LightGBMEngine(self)
