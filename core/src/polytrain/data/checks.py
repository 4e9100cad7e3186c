"""Checks of a job's data sets, before any worker starts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from polytrain.config.configs import DataConfig, ScalingConfig
from polytrain.config.constraints import field_problems, wrong_type
from polytrain.config.mix import Mix
from polytrain.data.plan.position import DataChangedError, DataPosition, StreamPosition
from polytrain.data.read.describe import computed, describe
from polytrain.data.read.mix import describe_mix
from polytrain.data.read.pieces import TablePiece
from polytrain.data.shards.assignment import RunDataset
from polytrain.data.shards.groups import count_missing, group_starts
from polytrain.data.shards.spec import DatasetSpec, ShardSpec, StreamSpec
from polytrain.data_errors import SourceError, too_few
from polytrain.text.described import numbered
from polytrain_plugins import Demand, Problem
from polytrain_plugins.close_names import did_you_mean
from polytrain_plugins.type_names import a_type, quoted

logger = logging.getLogger(__name__)

_OPTIONS = tuple(each.name for each in fields(DataConfig))

_MUCH = 2.0
"""A read amplification that deserves a warning."""


def described(
    datasets: Any, configs: Any, *, needs_train: bool, num_workers: int
) -> tuple[tuple[RunDataset, ...], tuple[Problem, ...]]:
    """Describe the data sets, and find problems with them and their options."""
    if not isinstance(datasets, Mapping):
        return (), (_unnamed(datasets),)
    problems = [*_config_problems(datasets, configs)]
    known: list[RunDataset] = []
    for name, data in datasets.items():
        config = configs.get(name) if isinstance(configs, Mapping) else None
        if not isinstance(config, DataConfig) or any(_of(name, problem) for problem in problems):
            config = DataConfig()
        if isinstance(data, Mix):
            mix, wrong = describe_mix(str(name), data, config)
            problems += wrong
            known += [] if mix is None else [RunDataset(source=mix, config=config)]
            continue
        try:
            source = describe(
                str(name),
                data,
                columns=config.columns,
                transform=config.transform,
                pack=config.pack,
            )
        except SourceError as error:
            problems.append(_problem(name, error))
        else:
            known.append(RunDataset(source=source, config=config))
    if datasets and not known and _is_table(datasets):
        return (), (_unnamed(datasets),)
    problems += [_misnamed(name) for name in datasets if not isinstance(name, str)]
    _warn_of_index_columns(known)
    problems += _train_problems(datasets, known, needs_train=needs_train, num_workers=num_workers)
    return tuple(known), tuple(problems)


def _is_table(columns: Mapping[Any, Any]) -> bool:
    """Return whether a dict that holds no data set is one itself, by columns."""
    if "train" in columns or any(_is_data(each) for each in columns.values()):
        return False
    try:
        describe("train", columns)
    except SourceError:
        return False
    return True


def _is_data(value: Any) -> bool:
    """Return whether it is a data set, perhaps one with a mistake, and no column."""
    return isinstance(value, Mapping) or len(getattr(value, "shape", ())) > 1


def _unnamed(data: Any) -> Problem:
    what = "a dict of columns" if isinstance(data, Mapping) else a_type(data)
    return Problem(
        field="datasets",
        what=f"it is {what}, not data sets by name",
        remedy='Pass datasets={"train": …}',
    )


def _misnamed(name: Any) -> Problem:
    return Problem(
        field="datasets",
        what=f"{quoted(name)} is not the name of a data set",
        remedy='Give a text, for example {"train": …}',
    )


def _warn_of_index_columns(datasets: Iterable[RunDataset]) -> None:
    """Warn once of the columns that are left out because they hold a DataFrame's index."""
    left_out = [
        f"{', '.join(map(repr, dataset.source.index))} of {dataset.name!r}"
        for dataset in datasets
        if dataset.source.index
    ]
    if left_out:
        logger.warning(
            "Columns that hold the index of a DataFrame are left out: %s. To have one, name it "
            "among the others in DataConfig(columns=[…]).",
            "; ".join(left_out),
        )


def grouped(
    datasets: Iterable[RunDataset], demand: Demand, *, num_workers: int, is_table: bool
) -> tuple[tuple[RunDataset, ...], tuple[Problem, ...]]:
    """Find where groups begin, in data sets that have them.

    Args:
        is_table: whether the backend reads all rows at once, and no training function does.
    """
    found, problems = [], []
    for dataset in datasets:
        column = dataset.config.group or demand.group
        if dataset.source.mix is not None and (is_table or demand.group):
            problems.append(
                Problem(
                    field=f"datasets[{dataset.name!r}]",
                    what="a mix is read batch by batch, and the backend reads all rows at once, "
                    "each of which counts as often as any other",
                    remedy="Pass the sources' rows together, with a column of weights if they "
                    "should count differently",
                )
            )
            continue
        if dataset.source.stream is not None and (
            column or dataset.config.shuffle or dataset.config.shards
        ):
            problems.append(
                Problem(
                    field=f"dataset_config[{dataset.name!r}]",
                    what="groups, shards and shuffling are not for a Ray dataset that streams",
                    remedy="Shuffle in the pipeline, as with dataset.random_shuffle(seed=0), or "
                    "pass dataset.materialize()",
                )
            )
            continue
        if demand.group and dataset.config.group not in (None, demand.group):
            problems.append(
                Problem(
                    field=f"dataset_config[{dataset.name!r}].group",
                    what=f"it is {dataset.config.group!r}, and the backend groups by "
                    f"{demand.group!r}",
                    remedy="Leave it out",
                )
            )
        elif column is not None:
            try:
                starts = group_starts(dataset.source, column)
            except SourceError as error:
                problems.append(_problem(dataset.name, error))
                continue
            if dataset.is_split and dataset.name not in demand.whole_datasets:
                dataset = replace(dataset, group_starts=starts)
                problems += _too_few(dataset.name, len(starts) - 1, "group", num_workers)
        found.append(dataset)
    return tuple(found), tuple(problems)


def incomplete(datasets: Iterable[RunDataset], columns: Mapping[str, str]) -> Iterator[Problem]:
    """Yield which columns lack values, in data sets whose rows are tables in memory.

    Other data would have to be read, or computed by the user's transform.

    Args:
        columns: option → column.
    """
    for dataset in datasets:
        source = dataset.source
        tables = [piece.table for piece in source.pieces if isinstance(piece, TablePiece)]
        if len(tables) < len(source.pieces) or source.transform is not None:
            continue
        rows = sum(map(len, tables))
        for option, column in columns.items():
            missing = sum(count_missing(table.column(column)) for table in tables)
            if missing:
                yield Problem(
                    field=option,
                    what=f"in {missing} of {rows} rows of {dataset.name!r} the column {column!r} "
                    "has no value (null or NaN)",
                    remedy="Leave such rows out, or give them a value",
                )


def ready(
    datasets: Iterable[RunDataset], demand: Demand, scaling: ScalingConfig
) -> tuple[tuple[RunDataset, ...], tuple[Problem, ...]]:
    """Run the pipelines that must end before training begins."""
    found, problems = [], []
    for dataset in datasets:
        reason = _why_not_streamed(dataset, demand, scaling)
        if dataset.source.stream is not None and reason is not None:
            if reason:
                logger.warning("The data set %r is computed first: %s.", dataset.name, reason)
            try:
                dataset = replace(dataset, source=computed(dataset.source))
            except SourceError as error:
                problems.append(_problem(dataset.name, error))
        found.append(dataset)
    return tuple(found), tuple(problems)


def skip_problems(specs: Iterable[DatasetSpec]) -> Iterator[Problem]:
    """Yield why a rollback has no batches that it could leave out of the data."""
    for spec in specs:
        if isinstance(spec, StreamSpec) and spec.name == "train":
            yield Problem(
                field="FailureConfig.on_divergence",
                what=f"'rollback' can't leave batches of the data set {spec.name!r} out: its rows "
                "have no numbers, as it is computed while it is read",
                remedy="Pass on_rollback=…, which returns another rate or seed, or use 'fail'",
            )


def position_problems(
    specs: Iterable[DatasetSpec], positions: Mapping[str, Any], *, field: str
) -> Iterator[Problem]:
    """Yield a problem for each data set in which a checkpoint's position isn't valid."""
    for spec in specs:
        saved = positions.get(spec.name)
        try:
            if isinstance(spec, StreamSpec):
                StreamPosition.resume(spec.name, saved, 1, spec.digests)
            else:
                DataPosition.resume(spec.name, saved, spec.plan, spec.digests, whole=spec.whole)
        except DataChangedError as error:
            yield Problem(field=field, what=error.what, remedy=error.remedy)


def warn_of_read_amplification(specs: Iterable[DatasetSpec], world_size: int) -> None:
    """Warn if workers read many times the rows that they use."""
    for spec in specs:
        # Each worker reads the sources of a mix in any case.
        if not isinstance(spec, ShardSpec) or spec.plan.mix is not None:
            continue
        if spec.read_amplification(world_size) >= _MUCH:
            logger.warning(
                "Each of %d workers reads up to %.1f times its part of the data set %r, which was "
                "cut into %s. A new run cuts it anew: pass restore_from=… with a "
                "checkpoint that was made between two epochs, and DataConfig(shards=%d).",
                world_size,
                spec.read_amplification(world_size),
                spec.name,
                numbered(spec.plan.shards, "shard"),
                world_size,
            )


def _why_not_streamed(dataset: RunDataset, demand: Demand, scaling: ScalingConfig) -> str | None:
    """Return why a pipeline must end before training begins.

    None if it needn't; "" if the user expects that.
    """
    if dataset.source.stream is None:
        return None
    whole = not dataset.is_split or dataset.name in demand.whole_datasets
    if scaling.num_workers == 0 or demand.reads_tables or whole:
        return ""
    if scaling.virtual_workers is not None:
        return "virtual workers share its rows, whose number must be known"
    from polytrain.data.read.ray_data import cpu_shortage
    from polytrain.ray_api.state import living_nodes

    held = {name: amount * scaling.max_workers for name, amount in scaling.resources.items()}
    cpus = sum(totals.get("CPU", 0) for totals in living_nodes().values())
    return cpu_shortage(dataset.source.stream, held, cpus)


def _problem(name: Any, error: SourceError) -> Problem:
    return Problem(field=f"datasets[{name!r}]", what=error.what, remedy=error.remedy)


def _of(name: Any, problem: Problem) -> bool:
    return problem.field.startswith(f"dataset_config[{name!r}]")


def _train_problems(
    datasets: Mapping[Any, Any],
    known: Iterable[RunDataset],
    *,
    needs_train: bool,
    num_workers: int,
) -> Iterator[Problem]:
    if needs_train and "train" not in datasets:
        yield Problem(
            field="datasets",
            what=f"there is no data set 'train', only {sorted(map(str, datasets))}"
            if datasets
            else "there are none",
            remedy='Pass datasets={"train": …}',
        )
    for dataset in known:
        rows = dataset.source.info.num_rows
        if rows is not None:
            yield from _too_few(dataset.name, rows, "row", num_workers)


def _too_few(name: str, count: int, what: str, num_workers: int) -> Iterator[Problem]:
    """Other data sets may leave a worker without rows: nothing is trained on them."""
    if name == "train" and count < num_workers:
        yield too_few(name, count, what, num_workers)


def _config_problems(datasets: Mapping[Any, Any], configs: Any) -> Iterator[Problem]:
    if not isinstance(configs, Mapping):
        yield wrong_type("dataset_config", configs, dict)
        return
    options = [name for name in configs if name in _OPTIONS and name not in datasets]
    if options:
        call = ", ".join(f"{name}=…" for name in options)
        yield Problem(
            field="dataset_config",
            what="it is a dict of options, not DataConfigs by the data sets' names",
            remedy=f"Pass DataConfig({call}), for all data sets, or one for each name",
        )
        return
    for name, config in configs.items():
        field = f"dataset_config[{name!r}]"
        if name not in datasets:
            meant = did_you_mean(name, datasets)
            yield Problem(
                field=field,
                what="there is no such data set",
                remedy=f"{meant}There are: {', '.join(map(str, datasets)) or 'none'}",
            )
        if not isinstance(config, DataConfig):
            yield wrong_type(field, config, DataConfig)
        else:
            yield from field_problems(config, field)
            yield from _split_problems(field, config.datasets_to_split, datasets)


def _split_problems(field: str, split: Any, datasets: Mapping[Any, Any]) -> Iterator[Problem]:
    if split == "all":
        return
    names = split if isinstance(split, list | tuple | set | frozenset) else None
    if names is None:
        yield Problem(
            field=f"{field}.datasets_to_split",
            what=f"{split!r} isn't a list of names",
            remedy="Give 'all', or the names of data sets, such as ['train']",
        )
        return
    for name in [name for name in names if name not in datasets]:
        yield Problem(
            field=f"{field}.datasets_to_split",
            what=f"there is no data set {name!r}",
            remedy=f"{did_you_mean(name, datasets)}"
            f"There are: {', '.join(map(str, datasets)) or 'none'}",
        )
