"""The driver half of a booster: the options that all boosters share, and their checks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar

from polytrain.boosting.problems import (
    CALLBACKS,
    COLUMN,
    PARAMS,
    categorical_problems,
    constraint_problems,
    feature_problems,
    model_problems,
    patience_problems,
)
from polytrain.config.constraints import Checked, Whole, column_names, field_problems
from polytrain_plugins import (
    Backend,
    Demand,
    Job,
    Problem,
    missing_columns,
    needed_without_function,
    number_problems,
    options_beside_function,
)

_ROUNDS = Whole(of="rounds", least=1, remedy="Give 1 or more")


@dataclass(frozen=True, kw_only=True)
class Booster(Backend):
    """Gradient boosted trees. A subclass is one framework, and adds that framework's own options.

    Three options are in every framework under different names: a subclass declares them, and names
    them in `score_option`, `query_option` and `model_option`. Its `name` is the framework's module.
    The options apply without a training function; with one they stay unset.
    """

    mutable_on_resume: ClassVar[frozenset[str]] = frozenset({"num_boost_round"})

    score_option: ClassVar[str]
    """The option that names the column with each row's initial score."""

    query_option: ClassVar[str]
    """The option that names the column with each row's query."""

    model_option: ClassVar[str]
    """The option for a model to continue."""

    forbidden_in_names: ClassVar[str]
    """Characters that the framework doesn't allow in a feature's name."""

    constraint_params: ClassVar[tuple[str, ...]]
    """The parameters that have an entry for each feature, or name features."""

    preload: ClassVar[tuple[str, ...]]
    """See `Demand.preload`."""

    params: Annotated[Mapping[str, Any], PARAMS] = field(default_factory=dict)
    """Parameters, as for the framework's own `train`; None stands for the default."""

    num_boost_round: Annotated[int, _ROUNDS] = 10
    """Boosting rounds in total, with those before a restart and those of the run whose checkpoint
    `restore_from` names: after 10 rounds there, 15 trains 5 more."""

    label: Annotated[str | None, COLUMN] = None
    """Column to predict."""

    weight: Annotated[str | None, COLUMN] = None
    """Column with the weights of the rows."""

    categorical: Annotated[Sequence[str], Checked(column_names)] = ()
    """Numeric features to treat as categories. Strings and columns of pandas' type `category`
    always are."""

    eval_train: bool = True
    """Whether to report metrics of the training rows too."""

    early_stopping_rounds: Annotated[int | None, _ROUNDS] = None
    """Stop when a metric of a data set besides "train" hasn't improved for this many rounds. The
    framework decides which metrics count."""

    callbacks: Annotated[Sequence[Any], CALLBACKS] = ()
    """Callbacks, as for the framework's own `train`. Every worker calls them."""

    bin_sample_rows: Annotated[
        int,
        Whole(of="rows", least=1, remedy="Give 1 or more; 200,000 is enough for 256 bins"),
    ] = 200_000
    """Number of rows, sampled from all workers, that all workers' bins are made from. If the sample
    is the whole data set, the order of rows makes no difference."""

    def __post_init__(self) -> None:
        if isinstance(self.params, Mapping):
            given = {name: value for name, value in self.params.items() if value is not None}
            object.__setattr__(self, "params", given)

    @property
    @abstractmethod
    def seed(self) -> int:
        """Seed of all random draws."""

    @abstractmethod
    def parameter_problems(self, job: Job) -> Iterable[Problem]:
        """Yield the problems of `params`, which is a mapping."""

    def label_problems(self) -> Iterable[Problem]:
        """Yield the problems of the options for the columns to predict."""
        return needed_without_function(self, label="Name the column to predict")

    def callback_problems(self) -> Iterable[Problem]:
        """Yield the problems of `callbacks`, which is a list; nothing by default."""
        return ()

    def other_problems(self, job: Job) -> Iterable[Problem]:
        """Yield the problems of this framework's own options; nothing by default."""
        return ()

    @property
    def labels(self) -> Mapping[str, str]:
        """Option → column to predict. Two columns are the bounds of one value."""
        return {} if self.label is None else {"label": self.label}

    @property
    def score_column(self) -> str | None:
        """Column with each row's initial score."""
        column: str | None = getattr(self, self.score_option)
        return column

    @property
    def query_column(self) -> str | None:
        """Column with each row's query."""
        column: str | None = getattr(self, self.query_option)
        return column

    @property
    def columns_besides_features(self) -> tuple[str, ...]:
        """The columns that aren't features."""
        columns = (*self.labels.values(), self.weight, self.score_column, self.query_column)
        return tuple(dict.fromkeys(column for column in columns if column is not None))

    @property
    def _complete(self) -> dict[str, str]:
        """Option → column in which every row needs a value."""
        columns = {
            **self.labels,
            "weight": self.weight,
            self.score_option: self.score_column,
        }
        return {option: column for option, column in columns.items() if column is not None}

    def features_of(self, columns: Iterable[str]) -> list[str]:
        """Return the features among a data set's columns, in their order."""
        besides = self.columns_besides_features
        return [column for column in columns if column not in besides]

    @property
    def total_steps(self) -> int:
        return self.num_boost_round

    def problems(self, job: Job) -> Iterable[Problem]:
        if job.has_training_function:
            yield from options_beside_function(self, [option.name for option in fields(self)])
            return
        numbers = {
            "label": self.label,
            **self.labels,
            "weight": self.weight,
            self.score_option: self.score_column,
        }
        columns = {**numbers, self.query_option: self.query_column}
        wrong = list(field_problems(self, ""))
        yield from wrong
        if any(problem.field in {*columns, "categorical"} for problem in wrong):
            return
        besides = self.columns_besides_features
        if isinstance(self.params, Mapping):
            yield from self.parameter_problems(job)
            yield from constraint_problems(job, besides, self.params, *self.constraint_params)
        yield from patience_problems(job, self.early_stopping_rounds)
        yield from self.label_problems()
        yield from missing_columns(job, **columns)
        yield from categorical_problems(job, self.categorical, besides)
        yield from number_problems(job, of_classes=("label",), **numbers)
        yield from feature_problems(
            job, besides, categorical=self.categorical, forbidden=self.forbidden_in_names
        )
        given_model = {self.model_option: getattr(self, self.model_option)}
        yield from model_problems(self.name, **given_model)
        if not any(problem.field == "callbacks" for problem in wrong):
            yield from self.callback_problems()
        yield from self.other_problems(job)

    def demand(self, job: Job) -> Demand:
        return Demand(
            preload=self.preload,
            reads_tables=True,
            group=self.query_column,
            complete={} if job.has_training_function else self._complete,
            # A metric such as AUC can't be combined from shards: one rank evaluates all rows.
            whole_datasets=frozenset()
            if job.has_training_function
            else frozenset(job.datasets) - {"train"},
        )
