"""The driver half: the options of `xgboost.train`, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from polytrain_plugins import (
    Backend,
    Capabilities,
    Demand,
    Device,
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
from polytrain_xgboost.parameters import (
    callback_problems,
    function_problems,
    parameter_problems,
    query_problems,
)

if TYPE_CHECKING:
    from polytrain_xgboost.engine import XGBoostEngine

_DECLARATIVE = (
    *("params", "num_boost_round", "label", "weight", "base_margin", "qid", "categorical"),
    *("eval_train", "early_stopping_rounds", "maximize", "obj", "custom_metric", "callbacks"),
    *("xgb_model", "bin_sample_rows", "external_memory"),
)


@dataclass(frozen=True, kw_only=True)
class XGBoost(Backend):
    """Gradient boosted trees by XGBoost.

    With a training function the collective is up when it is called: `xgboost.train` on the
    worker's shard trains one model with all others, and the options here stay unset.
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
    mutable_on_resume: ClassVar[frozenset[str]] = frozenset({"num_boost_round"})

    params: Mapping[str, Any] = field(default_factory=dict)
    """Booster parameters, as for `xgboost.train`. By default `nthread` is the worker's CPUs, and
    `device` "cuda" where workers have a GPU each."""

    num_boost_round: int = 10
    """Boosting rounds in all, those before a restart included."""

    label: str | None = None
    """Column to predict."""

    weight: str | None = None
    """Column with the weights of the rows."""

    base_margin: str | None = None
    """Column with the score that each row begins with."""

    qid: str | None = None
    """Column that tells the query of a row, for ranking. The rows of a query lie together, and
    stay on one worker. All other columns are features."""

    categorical: Sequence[str] = ()
    """Features that are categories although they are numbers. Strings always are, and columns of
    pandas' type `category`."""

    eval_train: bool = True
    """Whether the metrics of the rows that are trained on are reported too."""

    early_stopping_rounds: int | None = None
    """Stop when the last metric of the last data set besides "train" hasn't improved for so many
    rounds."""

    maximize: bool | None = None
    """Whether more is better of the metric that early stopping looks at. By default it is for the
    metrics that XGBoost knows as such, by their names."""

    obj: Callable[..., Any] | None = None
    """An objective of one's own, as for `xgboost.train`. It gets the rows of one worker."""

    custom_metric: Callable[..., Any] | None = None
    """A metric of one's own, as for `xgboost.train`."""

    callbacks: Sequence[Any] = ()
    """Callbacks as for `xgboost.train`, called by every worker. After a restart they are new ones;
    the metrics that they get are those of all rounds."""

    xgb_model: Any = None
    """An `xgboost.Booster`, or the path of its file on every node, to whose trees `num_boost_round`
    are added. The parameters that it was trained with are not taken over."""

    bin_sample_rows: int = 200_000
    """Rows, of all workers together, from which the bins are made that every worker takes. In what
    order the rows of a data set are that has no more makes no difference."""

    external_memory: bool = False
    """Keep the rows that are trained on, and their bins, on the nodes' disks: for data that don't
    fit into memory. Slower, and the same model."""

    @property
    def columns_besides_features(self) -> tuple[str, ...]:
        """The columns that something else is in."""
        others = (self.label, self.weight, self.base_margin, self.qid)
        return tuple(dict.fromkeys(column for column in others if column is not None))

    @property
    def booster_params(self) -> dict[str, Any]:
        """The parameters, but for what is drawn here."""
        params = {name: value for name, value in self.params.items() if name != "subsample"}
        constraints = params.get("monotone_constraints")
        if isinstance(constraints, list | tuple):
            # As text, XGBoost takes a value for each feature.
            params["monotone_constraints"] = f"({','.join(map(str, constraints))})"
        return {**params, "seed_per_iteration": True}

    @property
    def row_rate(self) -> float:
        """The part of the rows that is drawn for a round."""
        return float(self.params.get("subsample", 1))

    @property
    def seed(self) -> int:
        """Of all that is drawn."""
        return int(self.params.get("seed", self.params.get("random_state", 0)))

    def problems(self, job: Job) -> Iterable[Problem]:
        if job.has_training_function:
            yield from options_beside_function(self, _DECLARATIVE)
            return
        not_names = tuple(
            not_column_names(
                label=self.label, weight=self.weight, base_margin=self.base_margin, qid=self.qid
            )
        )
        if not_names:
            yield from not_names
            return
        yield from not_a_mapping(params=self.params)
        if isinstance(self.params, Mapping):
            yield from parameter_problems(self.params, job)
            yield from query_problems(self.params, self.qid)
            yield from constraint_problems(
                job,
                self.columns_besides_features,
                self.params,
                "monotone_constraints",
                "interaction_constraints",
            )
        yield from not_a_count(num_boost_round=self.num_boost_round)
        yield from patience_problems(job, early_stopping_rounds=self.early_stopping_rounds)
        yield from missing_label(self.label)
        yield from missing_columns(
            job,
            label=self.label,
            weight=self.weight,
            base_margin=self.base_margin,
            qid=self.qid,
        )
        yield from categorical_problems(job, self.categorical, self.columns_besides_features)
        yield from number_problems(
            job, label=self.label, weight=self.weight, base_margin=self.base_margin
        )
        yield from feature_problems(
            job, self.columns_besides_features, categorical=self.categorical, forbidden="[]<"
        )
        yield from sample_problems(bin_sample_rows=self.bin_sample_rows)
        if self.external_memory:
            yield from self._external_problems(job)
        yield from model_problems("xgboost", xgb_model=self.xgb_model)
        yield from function_problems(obj=self.obj, custom_metric=self.custom_metric)
        yield from callback_problems(self.callbacks)

    def _external_problems(self, job: Job) -> Iterator[Problem]:
        if self.qid is not None:
            yield Problem(
                field="external_memory",
                what="it is not for ranking: the rows of a query would be torn apart",
                remedy="Leave it out, or use more workers, each of which has less to hold",
            )
        train = job.datasets.get("train")
        if train is not None and train.num_rows is None:
            yield Problem(
                field="external_memory",
                what="the data set 'train' is a Ray pipeline, whose rows come only once",
                remedy="Pass Parquet files, or dataset.materialize()",
            )

    def demand(self, job: Job) -> Demand:
        return Demand(
            preload=(
                "xgboost",
                "xgboost.tracker",
                "xgboost.collective",
                "polytrain_xgboost.engine",
            ),
            # What needn't be in memory isn't held by the agents either.
            reads_tables=not self.external_memory,
            group=self.qid,
            # A metric such as AUC can't be put together from shards: one rank evaluates all rows.
            whole_datasets=frozenset()
            if job.has_training_function
            else frozenset(job.datasets) - {"train"},
        )

    def engine(self) -> XGBoostEngine:
        from polytrain_xgboost.engine import XGBoostEngine

        return XGBoostEngine(self)
