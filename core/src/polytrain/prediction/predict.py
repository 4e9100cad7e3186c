"""Runs a prediction: checks the request, divides the rows, has workers predict them, collects."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from polytrain.api.backend_checks import installation_problems, raise_if_any
from polytrain.api.cluster_checks import directory_problems, import_problems
from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.checkpoint.starting_point import manifest_at
from polytrain.config.configs import ScalingConfig
from polytrain.config.constraints import Checked, Whole, field_problems, storage_place
from polytrain.config.run_spec import RunSpec
from polytrain.data.fingerprint import digests, digests_of_sample, fingerprint
from polytrain.data.read.describe import Source, computed
from polytrain.data.shards.rows import PieceRows
from polytrain.errors import RunOwnedError
from polytrain.functions.code_fingerprint import python_version
from polytrain.functions.function_checks import pickle_problems
from polytrain.functions.pickling import code_in, pickled_apart
from polytrain.linux.machine_resources import machine_resources, visible_gpus
from polytrain.policy.scaling import choose_cluster, new_ray_problems
from polytrain.prediction.checks import (
    column_name,
    column_problems,
    described,
    device_problems,
    kept_as,
    key_problems,
    option_problems,
    output_problems,
    transform_problems,
    with_keys,
    without_kept,
)
from polytrain.prediction.local_workers import InlineWorkers, LocalWorkers
from polytrain.prediction.model_files import ModelFiles, digest_of
from polytrain.prediction.output_files import OutputFiles
from polytrain.prediction.parts import PART_ROWS, Part, Unit, default_part_rows, divided, units
from polytrain.prediction.predictor import PredictionTask, joined, streams
from polytrain.prediction.record import PredictionRecord, split_options
from polytrain.prediction.scheduling import PickledTask, RowsOf, Workers, predicted_parts
from polytrain.run.lease import leased
from polytrain.storage.location import Location, writing_problems
from polytrain.text.described import ShortRepr
from polytrain.workers.available_clusters import available_clusters
from polytrain_plugins import (
    Backend,
    InvalidJobError,
    Job,
    Predictions,
    Problem,
    UnsupportedCapabilityError,
)
from polytrain_plugins.returned import columns_of, demand_of, engine_of

logger = logging.getLogger(__name__)

_ROWS = Whole(of="rows", least=1, remedy="Give 1 or more or leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionRequest:
    """The arguments of `Result.predict`."""

    backend: Backend
    checkpoint: Checkpoint
    data: Any
    output: Annotated[str | Path | None, Checked(storage_place)] = None
    keep: Sequence[str] = ()
    prediction_column: Annotated[str, Checked(column_name)] = "prediction"
    num_workers: Annotated[
        int | None,
        Whole(
            of="workers",
            least=0,
            remedy="Give 1 or more, 0 to predict in this process, or leave it out",
        ),
    ] = None
    use_gpu: bool = False
    batch_size: Annotated[int | None, _ROWS] = None
    rows_per_file: Annotated[int | None, _ROWS] = None
    transform: Callable[..., Mapping[str, Any]] | None = None
    transformed: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PredictionOutput(ShortRepr):
    """Predictions that were stored as Parquet files.

    The files' names sort in the order of the rows, which is also the order within a file. All
    readers of Parquet directories read them as one table.
    """

    path: str
    """The directory, or its address."""

    num_rows: int
    files: tuple[str, ...]
    """Names of the files, in order."""


def predict(request: PredictionRequest) -> Predictions | PredictionOutput:
    """Predict the rows of a data set; see `Result.predict`."""
    if not request.backend.capabilities.predictive:
        raise UnsupportedCapabilityError(
            f"The {request.backend.name} backend doesn't predict: use result.load_model() and its "
            "own method."
        )
    keep: Any = request.keep
    if isinstance(keep, Iterable) and not isinstance(keep, str):
        request = replace(request, keep=tuple(keep))
    source = _checked(request)
    model = ModelFiles(checkpoint=request.checkpoint)
    with model.directory() as directory:
        engine = engine_of(request.backend)
        names = without_kept(source.schema.names)
        needed = columns_of(engine, directory, names, request.options)
        digest = "" if request.output is None else digest_of(directory)
    if request.transform is None and {*(needed or ()), *request.keep} & {*source.index}:
        source = described(request.data, columns=[*source.schema.names, *source.index])
    raise_if_any(column_problems(needed, without_kept(source.schema.names)))
    # Fingerprint a pipeline by its steps, before it computes blocks.
    known_by = ""
    if request.output is not None:
        known_by = fingerprint(source, {**digests(source), **digests_of_sample(source)})
    source = computed_in_order(source)
    task = _task(request, source, model, needed)
    parts = divided(_rows(source), _part_rows(request, source))
    if task.output is None:
        return _array(request, task, parts)
    record = _record(request, source, model=digest, data=known_by)
    return _stored(request, task, record, parts, task.output)


def _checked(request: PredictionRequest) -> Source:
    """Return the rows to predict if the request has no problems.

    Raises:
        InvalidJobError: with all problems.
    """
    raise_if_any((*import_problems(), *directory_problems()))
    problems = [*_argument_problems(request)]
    of_transform = [*_transform_problems(request)]
    problems += of_transform
    # Don't call a transform with problems: a wrong one may fail.
    transform = None if of_transform else with_keys(request.transform, request.keep)
    try:
        source = described(request.data, transform=transform)
    except InvalidJobError as error:
        raise InvalidJobError((*problems, *error.problems)) from error
    problems += key_problems(
        request.keep,
        [*without_kept(source.schema.names), *(source.index if transform is None else ())],
        prediction_column=request.prediction_column,
        has_output=request.output is not None,
    )
    problems += option_problems(
        request.backend, request.options, source, is_sent=request.num_workers != 0
    )
    raise_if_any(problems)
    return source


def _argument_problems(request: PredictionRequest) -> Iterator[Problem]:
    of_fields = [*field_problems(request, "")]
    yield from of_fields
    if not any(problem.field == "use_gpu" for problem in of_fields):
        yield from device_problems(
            request.backend, use_gpu=request.use_gpu, num_workers=request.num_workers
        )
    yield from installation_problems(request.backend)
    if request.output is None:
        if request.rows_per_file is not None:
            yield Problem(
                field="rows_per_file",
                what="there are no files without an output",
                remedy='Pass output="…" too, or leave it out',
            )
        return
    if not any(problem.field == "output" for problem in of_fields):
        yield from writing_problems(
            Location.of(request.output),
            field="output",
            num_workers=0 if request.num_workers == 0 else 1,
        )


def _transform_problems(request: PredictionRequest) -> Iterator[Problem]:
    location = Location.of(request.checkpoint.path, request.checkpoint.filesystem, retry_s=0)
    yield from transform_problems(
        manifest_at(location), request.transform, transformed=request.transformed
    )
    if callable(request.transform) and request.num_workers != 0:
        yield from pickle_problems("transform", request.transform)


def _rows(source: Source) -> int:
    assert source.info.num_rows is not None
    return source.info.num_rows


def _part_rows(request: PredictionRequest, source: Source) -> int:
    if request.output is None:
        return PART_ROWS
    # It may be a number of NumPy's, which the output's record can't hold.
    return int(request.rows_per_file or default_part_rows(_rows(source)))


def _task(
    request: PredictionRequest, source: Source, model: ModelFiles, needed: Sequence[str] | None
) -> PredictionTask:
    names = source.schema.names
    model_columns = tuple(_for_every_model(request, names) if needed is None else needed)
    keep = {kept_as(name, names): name for name in request.keep}
    read = {*model_columns, *keep}
    output = request.output
    return PredictionTask(
        backend=request.backend,
        model=model,
        source=source,
        columns=tuple(name for name in names if name in read),
        model_columns=model_columns,
        batch_size=request.batch_size or request.backend.prediction_batch_size,
        keep=keep,
        prediction_column=request.prediction_column,
        output=None if output is None else OutputFiles(location=Location.of(output)),
        options=request.options,
    )


def _for_every_model(request: PredictionRequest, names: Sequence[str]) -> Sequence[str]:
    """Return the columns of a model that takes all; not those that are only kept beside them."""
    if request.transform is None or not request.keep:
        return names
    own: list[str] = described(request.data, transform=request.transform).schema.names
    return own


def _record(
    request: PredictionRequest, source: Source, *, model: str, data: str
) -> PredictionRecord:
    free = request.backend.mutable_prediction_options
    given = {name: value for name, value in request.options.items() if name not in free}
    if request.transform is not None:
        given["transform"] = request.transform
    options, code = split_options(given)
    return PredictionRecord(
        model=model,
        data=data,
        rows=_rows(source),
        rows_per_file=_part_rows(request, source),
        keep=tuple(request.keep),
        prediction_column=request.prediction_column,
        options=options,
        code=code,
        python=python_version(),
    )


def _array(request: PredictionRequest, task: PredictionTask, parts: Sequence[Part]) -> Predictions:
    work = units(parts, task.source.pieces)
    with _workers(request, task, work, has_many=len(parts) > 1) as workers:
        done = sorted(predicted_parts(workers, work), key=lambda part: part.number)
    return joined([part.predictions for part in done if part.predictions is not None])


def _stored(
    request: PredictionRequest,
    task: PredictionTask,
    record: PredictionRecord,
    parts: Sequence[Part],
    output: OutputFiles,
) -> PredictionOutput:
    """Store the predictions of all parts that aren't in the output yet."""
    files = tuple(part.file for part in parts)
    result = PredictionOutput(path=output.location.address, num_rows=record.rows, files=files)
    raise_if_any(output_problems(output, record))
    with _owned(output):
        # Check again: its previous owner may have written meanwhile.
        raise_if_any(output_problems(output, record))
        before = output.record()
        if before is not None and before.finished and output.names() >= {*files}:
            return result
        output.clear_staging()
        output.write_record(record)
        work = units(parts, task.source.pieces, finished=output.finished(parts))
        if work:
            with _workers(request, task, work, has_many=len(parts) > 1) as workers:
                for _ in predicted_parts(workers, work):
                    pass
        output.expect(files)
        output.clear_staging()
        output.write_record(replace(record, finished=True))
    return result


@contextmanager
def _owned(output: OutputFiles) -> Iterator[None]:
    """Hold the lease on the output.

    Raises:
        InvalidJobError: another process writes to it.
    """
    wording = ("The output", "Wait for it to end, or give a different output")
    no_retry = replace(output.lock, retry_s=0)
    try:
        with leased(output.lock.open(), no_retry.open(), wording=wording):
            yield
    except RunOwnedError as error:
        problem = Problem(
            field="output",
            what=str(error).rstrip("."),
            remedy="Files that are finished are kept: the next call resumes after them",
        )
        raise InvalidJobError((problem,)) from error


@contextmanager
def _workers(
    request: PredictionRequest, task: PredictionTask, work: Sequence[Unit], *, has_many: bool
) -> Iterator[Workers]:
    """Yield workers: this process, local processes, or actors on Ray; see `Result.predict`."""
    if request.num_workers == 0 or (request.num_workers is None and not has_many):
        yield InlineWorkers(task)
        return
    scaling = ScalingConfig(num_workers=request.num_workers or 1, use_gpu=request.use_gpu)
    around = available_clusters(RunSpec(backend=request.backend, datasets={"data": request.data}))
    raise_if_any(new_ray_problems(scaling, around))
    if choose_cluster(scaling, around).is_local:
        gpus = visible_gpus(os.environ) if request.use_gpu else ()
        most = len(gpus) or max(1, int(machine_resources(os.environ)["CPU"]))
        wanted = request.num_workers or most
        if 0 < len(gpus) < wanted:
            logger.warning(
                "num_workers=%d: each worker has a GPU of its own, so there are %d.",
                wanted,
                len(gpus),
            )
        count = min(wanted, len(work), len(gpus) or len(work))
        demand = demand_of(request.backend, _job(count))
        pickled, rows_of = _for_other_processes(task)
        with LocalWorkers(
            pickled,
            count=count,
            modules=demand.preload,
            environment={"OMP_NUM_THREADS": "1", **demand.environment},
            gpus=gpus,
            rows_of=rows_of,
        ) as workers:
            yield workers
        return
    # Import it late: importing Ray takes a while.
    from polytrain.prediction.ray_workers import REFERENCES, RayWorkers, free_workers, has_nodes
    from polytrain.workers.ray.connection import running_ray

    with running_ray():
        if has_nodes():
            task = replace(task, model=task.model.for_other_nodes())
        pickled, rows_of = _for_other_processes(task, apart=REFERENCES)
        count = min(request.num_workers or free_workers(use_gpu=request.use_gpu), len(work))
        with RayWorkers(pickled, count=count, use_gpu=request.use_gpu, rows_of=rows_of) as actors:
            yield actors


def _for_other_processes(
    task: PredictionTask, *, apart: tuple[type, ...] = ()
) -> tuple[PickledTask, RowsOf]:
    """Return the pickled task, and a function that returns the rows to send with a unit.

    Args:
        task: the task for every process.
        apart: types of objects that Ray must send itself.
    """
    source = task.source
    # The class of a map-style data set may be defined in a script.
    datasets = [getattr(piece.unwrapped, "dataset", None) for piece in source.pieces[:1]]
    transforms = [getattr(piece, "transform", None) for piece in source.pieces[:1]]
    code = code_in([task.backend, dict(task.options), datasets, transforms])
    if not source.in_memory:
        return pickled_apart(*code, value=task, kind=apart), lambda unit: None
    rows = PieceRows(source.pieces, source.schema)
    columns = list(task.columns)

    def rows_of(unit: Unit) -> Sequence[bytes]:
        table = rows.read(range(unit[0].rows.start, unit[-1].rows.stop)).select(columns)
        return [*streams(table)]

    bare = replace(task, source=replace(source, pieces=()))
    return pickled_apart(*code, value=bare, kind=apart), rows_of


def _job(num_workers: int) -> Job:
    return Job(
        num_workers=num_workers,
        use_gpu=False,
        cpus_per_worker=1,
        has_training_function=False,
        datasets={},
    )


def computed_in_order(source: Source) -> Source:
    """Return a data set with pieces: its own, or those of a pipeline, which this runs.

    By default Ray yields blocks as they are finished. Another run would then have other rows at the
    same indices, so predictions could not be resumed.
    """
    if source.stream is None:
        return source
    # Restore these settings later: the data set is the user's.
    options = source.stream.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        return computed(source)
    finally:
        options.preserve_order = before
