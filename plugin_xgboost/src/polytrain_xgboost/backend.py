"""The driver half: the options of `xgboost.train`, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from polytrain.boosting.booster import Booster
from polytrain.boosting.problems import COLUMN, score_problems
from polytrain_plugins import (
    Capabilities,
    DatasetInfo,
    Demand,
    Device,
    Job,
    Problem,
    is_category,
    unknown_name,
)
from polytrain_xgboost.parameters import (
    QUANTILES,
    bound_problems,
    callback_problems,
    class_problems,
    feature_weight_problems,
    function_problems,
    is_true,
    number_of_outputs,
    parameter_problems,
    query_problems,
    train_metric_problems,
    tree_problems,
)

if TYPE_CHECKING:
    from polytrain_xgboost.engine import XGBoostEngine

_OF_PREDICT = (
    *("output_margin", "pred_leaf", "pred_contribs", "approx_contribs", "pred_interactions"),
    *("validate_features", "training", "iteration_range", "strict_shape"),
)


@dataclass(frozen=True, kw_only=True)
class XGBoost(Booster):
    """Gradient boosted trees by XGBoost.

    A training function runs with the collective connected: `xgboost.train` on each worker's shard
    trains one model together. The options here then stay unset.

    In `params`, `nthread` defaults to the worker's CPUs, and `device` to "cuda" if each worker has
    a GPU. Early stopping uses the last metric of the last data set besides "train". A restart
    creates new callbacks, which get the metrics of all rounds.
    """

    name: ClassVar[str] = "xgboost"
    contract_version: ClassVar[int] = 1
    capabilities: ClassVar[Capabilities] = Capabilities(
        declarative=True,
        predictive=True,
        exact_resume=True,
        exact_scaling=True,
        devices=frozenset({Device.CPU, Device.GPU}),
    )
    requires: ClassVar[dict[str, str]] = {
        "xgboost": "pip install 'polytrain[xgboost]', or 'polytrain[xgboost-cpu]' without GPUs"
    }
    score_option: ClassVar[str] = "base_margin"
    query_option: ClassVar[str] = "qid"
    model_option: ClassVar[str] = "xgb_model"
    forbidden_in_names: ClassVar[str] = "[]<"
    constraint_params: ClassVar[tuple[str, ...]] = (
        "monotone_constraints",
        "interaction_constraints",
    )
    preload: ClassVar[tuple[str, ...]] = (
        "xgboost",
        "xgboost.tracker",
        "xgboost.collective",
        "polytrain_xgboost.engine",
    )

    label_lower_bound: Annotated[str | None, COLUMN] = None
    """With the objective "survival:aft", the column with the lower bound of each row's label."""

    label_upper_bound: Annotated[str | None, COLUMN] = None
    """Column with the upper bound of each row's label; infinite if the event wasn't observed."""

    base_margin: Annotated[str | None, COLUMN] = None
    """Column with each row's initial score (margin)."""

    qid: Annotated[str | None, COLUMN] = None
    """Column with the query of each row, for ranking. Rows of a query must be consecutive, and
    stay on one worker. All other columns are features."""

    maximize: bool | None = None
    """Whether early stopping maximizes its metric. By default the metric's name decides, as in
    XGBoost."""

    obj: Callable[..., Any] | None = None
    """Your own objective, as for `xgboost.train`. It is called with one worker's rows."""

    custom_metric: Callable[..., Any] | None = None
    """Your own metric, as for `xgboost.train`."""

    xgb_model: Any = None
    """A model to continue with `num_boost_round` more rounds: an `xgboost.Booster`, or the path of
    its file on every node. Its own training parameters are ignored."""

    feature_weights: Sequence[float] | None = None
    """Each feature's relative probability of being drawn by `colsample_bytree` and the like, in
    the features' order."""

    external_memory: bool = False
    """Keep the training rows and their bins on the nodes' disks, for data that doesn't fit into
    memory. Training is slower; the model is the same."""

    @property
    def labels(self) -> Mapping[str, str]:
        bounds = {
            "label_lower_bound": self.label_lower_bound,
            "label_upper_bound": self.label_upper_bound,
        }
        given = {option: column for option, column in bounds.items() if column is not None}
        return {**super().labels, **given}

    def label_problems(self) -> Iterable[Problem]:
        return bound_problems(self)

    @property
    def booster_params(self) -> dict[str, Any]:
        """XGBoost's parameters, except `subsample`: this package draws the rows."""
        params = {name: value for name, value in self.params.items() if name != "subsample"}
        constraints = params.get("monotone_constraints")
        if isinstance(constraints, list | tuple):
            # XGBoost takes a value for each feature as text only.
            params["monotone_constraints"] = f"({','.join(map(str, constraints))})"
        return {**params, "seed_per_iteration": True}

    @property
    def row_rate(self) -> float:
        """The fraction of rows that are drawn for a round."""
        return float(self.params.get("subsample", 1))

    @property
    def quantiles_in_leaves(self) -> bool:
        """Whether this package sets leaves to quantiles of all workers' residuals."""
        params = self.params
        return (
            self.obj is None and params.get("objective") in QUANTILES and not self.averages_leaves
        )

    @property
    def averages_leaves(self) -> bool:
        """Whether XGBoost averages quantile leaves over the workers."""
        return self.params.get("objective") in QUANTILES and self.params.get("booster") == "dart"

    @property
    def has_several_classes(self) -> bool:
        """Whether XGBoost's objective gives each row a score for each class."""
        return self.obj is None and str(self.params.get("objective")).startswith("multi:")

    @property
    def seed(self) -> int:
        """Seed of all random draws."""
        return int(self.params.get("seed", self.params.get("random_state", 0)))

    @property
    def needs_all_rounds(self) -> bool:
        """Whether a restart repeats all rounds.

        XGBoost can't resume with the position biases that `lambdarank_unbiased` has learned.
        """
        return is_true(self.params, "lambdarank_unbiased", default=False)

    def parameter_problems(self, job: Job) -> Iterable[Problem]:
        yield from parameter_problems(self.params, job)
        yield from query_problems(self.params, self.qid)
        if self.eval_train and job.num_workers > 1:
            yield from train_metric_problems(self.params)

    def callback_problems(self) -> Iterable[Problem]:
        return callback_problems(self.callbacks)

    def other_problems(self, job: Job) -> Iterable[Problem]:
        if self.external_memory:
            yield from self._external_problems(job)
        yield from function_problems(obj=self.obj, custom_metric=self.custom_metric)
        if isinstance(self.params, Mapping):
            yield from tree_problems(self.params, self._categories(job))
            if self.obj is None:
                yield from class_problems(self.params)
            several = number_of_outputs(self.params) > 1
            yield from score_problems("base_margin", self.base_margin, has_several=several)
        if self.feature_weights is not None:
            features = self.features_of(job.datasets["train"].columns)
            yield from feature_weight_problems(self.feature_weights, features)

    def _categories(self, job: Job) -> list[str]:
        """Return the features that are known to be categories."""
        train = job.datasets.get("train", DatasetInfo(name="train"))
        kinds = {name: train.type_of(name) for name in self.features_of(train.columns)}
        return [
            name
            for name, kind in kinds.items()
            if name in self.categorical or (kind is not None and is_category(kind))
        ]

    def _external_problems(self, job: Job) -> Iterator[Problem]:
        if self.qid is not None:
            yield Problem(
                field="external_memory",
                what="it can't be used for ranking: parts of a shard would split queries",
                remedy="Leave it out, or use more workers, which need less memory each",
            )
        train = job.datasets.get("train")
        if train is not None and train.num_rows is None:
            yield Problem(
                field="external_memory",
                what="the data set 'train' is a Ray pipeline, whose rows can be read only once",
                remedy="Pass Parquet files, or dataset.materialize()",
            )

    def prediction_problems(
        self, options: Mapping[str, Any], data: DatasetInfo
    ) -> Iterable[Problem]:
        for name in options:
            yield from unknown_name(name, name, _OF_PREDICT, "the arguments of Booster.predict")

    def demand(self, job: Job) -> Demand:
        # With external memory, the agents must not hold all rows in memory either.
        reads_tables = not self.external_memory
        return replace(super().demand(job), reads_tables=reads_tables, leader_ports=1)

    def engine(self) -> XGBoostEngine:
        from polytrain_xgboost.engine import XGBoostEngine

        return XGBoostEngine(self)
