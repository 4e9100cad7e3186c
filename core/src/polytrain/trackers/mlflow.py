"""A tracker that sends to MLflow: a server, or a database file."""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from polytrain.checkpoint.manifest import Manifest
from polytrain.text import strict_json
from polytrain.text.described import shortened
from polytrain.text.secret_names import holds_credentials, without_credentials
from polytrain.trackers.description import Description
from polytrain.trackers.tracker import Row, TrackedRun, Tracker, numbers
from polytrain_plugins import Problem
from polytrain_plugins.installed import install_command

_KEY = "polytrain.key"
_NAME_LENGTH = 250
_VALUE_LENGTH = 5000
_SQLITE = "sqlite:///"
_CHECKPOINT_FILE = "checkpoint.json"


@dataclass(frozen=True)
class MLflow(Tracker):
    """Sends metrics, options and the ledger to a run of MLflow.

    MLflow can't remove a metric. So a step is sent once a checkpoint covers it, or the run is
    finished: then no restart repeats it. Metrics that aren't numbers are left out.

    Args:
        uri: the server, or a database such as `sqlite:///mlflow.db`; by default
            `MLFLOW_TRACKING_URI`, or `sqlite:///mlflow.db`. A password in it isn't kept with the
            run: `polytrain sync` reads it from `MLFLOW_TRACKING_URI`.
        experiment: the experiment's name; by default `MLFLOW_EXPERIMENT_NAME`, or `Default`.
        log_checkpoint: whether the newest checkpoint is logged at the end, as an artifact
            `checkpoint.json` with its path, step, metrics, and its files' names and hashes.
            The files themselves aren't copied.
        system_metrics: whether a row also has how busy each rank was, and its CPU use, memory and
            GPUs, if they were measured since the row before: every
            `FailureConfig.straggler_window_s` seconds.
    """

    name: ClassVar[str] = "mlflow"
    requires: ClassVar[tuple[str, ...]] = ("mlflow",)
    run_ids: ClassVar[str] = "[0-9a-f]{32}"

    uri: str | None = None
    experiment: str | None = None
    log_checkpoint: bool = False
    system_metrics: bool = False

    def __repr__(self) -> str:
        # Commands and errors show it.
        shown = replace(self, uri=self.uri and without_credentials(self.uri))
        options = ", ".join(f"{name}={value!r}" for name, value in asdict(shown).items())
        return f"MLflow({options})"

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        scheme = str(self._uri).partition("://")[0]
        missing = [each for each in ("sqlalchemy", "alembic") if find_spec(each) is None]
        if "sql" in scheme and missing:
            yield Problem(
                field="MLflow.uri",
                what=f"a database ({scheme}) needs {' and '.join(missing)}, not installed here",
                remedy=install_command("pip install 'polytrain[mlflow]'"),
            )

    @property
    def _uri(self) -> str:
        return self.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"{_SQLITE}mlflow.db"

    def resolved(self) -> Tracker:
        uri = self._uri
        experiment = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        if uri.startswith(_SQLITE):
            file, mark, options = uri.removeprefix(_SQLITE).partition("?")
            uri = f"{_SQLITE}{Path(file).expanduser().absolute()}{mark}{options}"
        return replace(self, uri=uri, experiment=experiment)

    def options(self) -> dict[str, Any]:
        options = super().options()
        if holds_credentials(self._uri):
            options.pop("uri", None)
        return options

    @property
    def place(self) -> str | None:
        return self._uri

    def at(self, place: str | None) -> Tracker:
        return replace(self, uri=place).resolved()

    def open(self, run: TrackedRun) -> MLflowRun:
        return MLflowRun(self, run)


class MLflowRun:
    """An MLflow run. MLflow ignores a metric that it has with the same step, time and value."""

    def __init__(self, tracker: MLflow, run: TrackedRun) -> None:
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.tracking import MlflowClient

        self._metric, self._param, self._tag = Metric, Param, RunTag
        self._client = MlflowClient(tracker._uri)
        self._manifest_of = run.manifest_of if tracker.log_checkpoint else None
        experiment = tracker.experiment or "Default"
        known = self._found(experiment, run)
        self.sent: int | None = 0 if known is None else None
        if known is None:
            known = self._created(experiment, run)
        self.run_id: str = known.info.run_id
        self._status: str = known.info.status
        self._ended_as: str | None = None

    def describe(self, description: Description) -> None:
        params = {
            metric_name(name): shortened(str(value), _VALUE_LENGTH)
            for name, value in description.parameters.items()
        }
        there = self._client.get_run(self.run_id).data.params
        new = [self._param(name, value) for name, value in params.items() if name not in there]
        self._client.log_batch(self.run_id, params=new)
        # MLflow can't change a parameter, but a resumed run may have another one.
        changed = {
            metric_name(f"polytrain.resumed_with.{name}"): value
            for name, value in params.items()
            if there.get(name, value) != value
        }
        tags = {**_source_tags(description), **changed}
        self._client.log_batch(self.run_id, tags=[self._tag(*each) for each in tags.items()])

    def write(self, rows: Sequence[Row]) -> None:
        if self._status != "RUNNING" and self._ended_as is None:
            self._ended_as = self._status
            self._client.update_run(self.run_id, status="RUNNING")
        metrics = [
            self._metric(metric_name(name), value, round(row.time * 1000), row.step)
            for row in rows
            for name, value in numbers(row.metrics).items()
        ]
        self._client.log_batch(self.run_id, metrics=metrics)

    def rewind(self, step: int) -> None:
        """Never called: metrics stay."""
        raise NotImplementedError

    def amend(self, row: Row) -> None:
        self.write([row])

    def finish(self, summary: Mapping[str, Any], *, succeeded: bool) -> None:
        tags = [
            self._tag(f"polytrain.{name}", str(value)[:_VALUE_LENGTH])
            for name, value in summary.items()
        ]
        self._client.log_batch(self.run_id, tags=tags)
        stopped = "KILLED" if summary["state"] == "stopped" else "FAILED"
        self._client.set_terminated(self.run_id, "FINISHED" if succeeded else stopped)
        self._ended_as = None
        # Log the artifact last: its storage may differ from the server's, and be unreachable.
        if self._manifest_of is not None and summary["checkpoint"]:
            self._refer(summary["checkpoint"], self._manifest_of(summary["checkpoint"]))

    def close(self) -> None:
        if self._ended_as is not None:
            # Restore the status: rows were sent after the run had ended.
            self._client.update_run(self.run_id, status=self._ended_as)

    def _refer(self, address: str, manifest: Manifest | None) -> None:
        if manifest is not None:
            facts = {"path": address, **asdict(manifest)}
            text = json.dumps(strict_json.plain(facts), indent=2, allow_nan=False)
            self._client.log_text(self.run_id, text, _CHECKPOINT_FILE)

    def _found(self, experiment: str, run: TrackedRun) -> Any:
        from mlflow.exceptions import MlflowException

        if run.run_id:
            try:
                known = self._client.get_run(run.run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                return None
            if known.data.tags.get(_KEY) != run.key:
                raise ValueError(
                    f"the run {run.run_id} of MLflow isn't that of {run.address}, which says so: "
                    f"its tag {_KEY} is another"
                )
            return known
        # An earlier process may have died before it could note the run that it had created.
        there = self._client.get_experiment_by_name(experiment)
        if there is None:
            return None
        same = f"tags.`{_KEY}` = '{run.key}'"
        return next(iter(self._client.search_runs([there.experiment_id], same)), None)

    def _created(self, experiment: str, run: TrackedRun) -> Any:
        there = self._client.get_experiment_by_name(experiment)
        number = (
            self._client.create_experiment(experiment) if there is None else there.experiment_id
        )
        tags = {_KEY: run.key, "polytrain.path": run.address}
        made = self._client.create_run(number, run_name=run.name, tags=tags)
        return made


def _source_tags(description: Description) -> dict[str, str]:
    """Return the tags by which MLflow shows a run's source, and the rest as polytrain's own."""
    own = {"mlflow.source.type": "LOCAL"}
    own["mlflow.source.name"] = description.script or description.command
    own["mlflow.source.git.commit"] = description.commit
    own["mlflow.source.git.branch"] = description.branch
    others = {"polytrain.command": description.command}
    others.update({f"polytrain.{name}": value for name, value in description.environment.items()})
    return {
        metric_name(name): shortened(value, _VALUE_LENGTH)
        for name, value in {**own, **others}.items()
        if value
    }


def metric_name(name: str) -> str:
    """Return a name that MLflow accepts: only certain characters, and no `a//b`."""
    taken = re.sub(r"[^\w\-. :/]", _escaped, name)
    if not taken or posixpath.normpath(taken) != taken or taken.startswith(("/", ".")):
        taken = re.sub(r"[/.]", _escaped, taken) or "_"
    if len(taken) > _NAME_LENGTH:
        digest = hashlib.sha256(taken.encode()).hexdigest()[:8]
        taken = f"{taken[: _NAME_LENGTH - 9]}-{digest}"
    return taken


def _escaped(found: re.Match[str]) -> str:
    return f"_x{ord(found[0]):02x}_"
