"""A tracker that sends to Weights & Biases, or writes an offline run for `wandb sync`."""

from __future__ import annotations

import configparser
import contextlib
import netrc
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

from polytrain.storage.beneath import Beneath
from polytrain.text.secret_names import holds_credentials, is_secret
from polytrain.trackers.description import Description, nested
from polytrain.trackers.tracker import Row, TrackedRun, Tracker, is_in, numbers
from polytrain.trackers.wandb_file import wait_until_complete
from polytrain_plugins import Problem

_MODES = ("online", "offline")
_NO_PROJECT = "uncategorized"
"""W&B's project for runs without one."""

_OFFLINE_RUN = re.compile(r"offline-run-[0-9_]+-(.+)")
_RESERVED = frozenset({"_step", "_timestamp", "_runtime", "_wandb"})
_CHECKPOINT_STEP = "checkpoint_step"
"""Axis of the metrics of checkpoints' validations."""

_CONNECT_TIMEOUT_S = 10.0
_INIT_TIMEOUT_S = 30.0
_WRITTEN_WITHIN_S = 10.0
"""Seconds that wandb's own process may take to write the rest of an offline run."""


@dataclass(frozen=True)
class WandB(Tracker):
    """Sends metrics, options and the ledger to a run of Weights & Biases.

    W&B can't remove a step. So a step is sent once a checkpoint covers it, or the run is finished:
    then no restart repeats it. A second process can't continue an offline run, so every driver that
    resumes the run replaces it by a complete one with the same id, which `wandb sync DIRECTORY`
    sends. Metrics are numbers and text; others are left out. Those of a validation come with a
    later step, at most one validation with each, and have the axis `checkpoint_step`.

    Args:
        project: the project; by default `WANDB_PROJECT`, or W&B's own default.
        entity: the user or team; by default `WANDB_ENTITY`, or the API key's.
        group: a name under which W&B shows runs together.
        mode: "online" or "offline"; by default `WANDB_MODE`, or "online".
        directory: the directory in which W&B keeps its files, in `wandb`; by default `WANDB_DIR`,
            or the run's directory.
        log_checkpoint: whether the newest checkpoint is logged at the end, as an artifact that
            refers to its address: its files aren't copied.
        system_metrics: whether a row also has how busy each rank was, and its CPU use, memory and
            GPUs, if they were measured since the row before: every
            `FailureConfig.straggler_window_s` seconds.
    """

    name: ClassVar[str] = "wandb"
    requires: ClassVar[tuple[str, ...]] = ("wandb",)
    run_ids: ClassVar[str] = "[0-9a-z]{1,64}"
    can_amend: ClassVar[bool] = False
    reopens: ClassVar[bool] = True

    project: str | None = None
    entity: str | None = None
    group: str | None = None
    mode: Literal["online", "offline"] | None = None
    directory: str | None = None
    log_checkpoint: bool = False
    system_metrics: bool = False

    @property
    def is_rewritten(self) -> bool:
        return self._mode == "offline"

    @property
    def _mode(self) -> str:
        given = self.mode or os.environ.get("WANDB_MODE") or "online"
        return "offline" if given == "dryrun" else given

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self._mode not in _MODES:
            yield Problem(
                field="WandB.mode" if self.mode else "WANDB_MODE",
                what=f"{self._mode!r} is not a mode of this tracker",
                remedy='Give "online" or "offline"; to track nothing, leave the tracker out',
            )
        elif self._mode == "online" and not _has_key():
            yield Problem(
                field="WandB.mode",
                what=f"there is no key for {_server()}",
                remedy='Run "wandb login", set WANDB_API_KEY, or use WandB(mode="offline")',
            )

    def place_problems(self, address: str, *, is_directory: bool) -> Iterator[Problem]:
        if self.resolved().directory is None and not is_directory and self.is_rewritten:
            yield Problem(
                field="WandB.directory",
                what=f"the run is stored in {address}, which isn't a directory",
                remedy='Give a directory for the offline run, for example directory="."',
            )

    def resolved(self) -> WandB:
        directory = self.directory or os.environ.get("WANDB_DIR")
        if directory:
            directory = str(Path(directory).expanduser().absolute())
        return replace(
            self,
            project=self.project or os.environ.get("WANDB_PROJECT") or None,
            entity=self.entity or os.environ.get("WANDB_ENTITY") or None,
            mode="offline" if self._mode == "offline" else "online",
            directory=directory or None,
        )

    @property
    def place(self) -> str | None:
        if self._mode == "offline":
            return self.directory
        project = self.project or _NO_PROJECT
        return f"{self.entity}/{project}" if self.entity else project

    def at(self, place: str | None) -> Tracker:
        if self._mode == "offline":
            return replace(self, directory=place).resolved()
        entity, _, project = (place or "").rpartition("/")
        project = "" if project == _NO_PROJECT else project
        online = replace(self, entity=entity or None, project=project or None, directory=None)
        return online.resolved()

    def stays_in(self, directory: Path) -> bool:
        is_offline = self._mode == "offline"
        return is_offline and is_in(directory, Path(self.directory or directory, "wandb"))

    def open(self, run: TrackedRun) -> WandBRun:
        return WandBRun(self.resolved(), run)


class WandBRun:
    """A W&B run in this process. wandb keeps a row open until the next one."""

    def __init__(self, tracker: WandB, run: TrackedRun) -> None:
        import wandb

        self._wandb = wandb
        self._log_checkpoint = tracker.log_checkpoint
        self._is_offline = tracker.is_rewritten
        self._name = run.name
        self.run_id = run.run_id or run.key
        directory = Path(tracker.directory or run.directory or Path.cwd())
        directory.mkdir(parents=True, exist_ok=True)
        if tracker.directory is None and run.directory is not None:
            # W&B opens its files by their paths.
            with Beneath(run.directory).directory("wandb", make=True):
                pass
        if not tracker.is_rewritten:
            _require_server()
        else:
            _remove_offline_run(directory / "wandb", self.run_id)
        self._run: Any = wandb.init(
            project=tracker.project,
            entity=tracker.entity,
            group=tracker.group,
            mode=tracker.mode,
            dir=str(directory),
            id=self.run_id,
            name=run.name,
            # Leave a run that the user's own program has open as the current one.
            reinit="create_new",
            resume=None if tracker.is_rewritten else "allow",
            settings=wandb.Settings(
                console="off",
                silent=True,
                init_timeout=_INIT_TIMEOUT_S,
                # The system statistics would be the driver's.
                x_disable_stats=True,
                # The metadata contain this process's command line.
                x_disable_meta=any(map(_holds_a_secret, sys.argv[1:])),
            ),
        )
        self.sent = max(0, self._run.step - 1) if self._run.resumed else 0
        self._last = self.sent
        """The last step in the store. The row of this process's last one is open."""

        self._validated: set[str] = set()
        self._exit_code: int | None = None

    def describe(self, description: Description) -> None:
        program = {f"polytrain.{name}": value for name, value in description.program.items()}
        config = nested({**description.parameters, **program})
        self._run.config.update(config, allow_val_change=True)

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            validated = {} if row.validation is None else self._validated_values(row.validation)
            self._log({**_values(row.metrics), **validated}, row.step, row.time)

    def rewind(self, step: int) -> None:
        """Never called: W&B can't remove steps."""
        raise NotImplementedError

    def amend(self, row: Row) -> None:
        self._log(self._validated_values(row), self._last + 1, row.time)

    def finish(self, summary: Mapping[str, Any], *, succeeded: bool) -> None:
        self._run.summary.update({f"polytrain/{name}": value for name, value in summary.items()})
        if self._log_checkpoint and summary["checkpoint"]:
            self._refer(summary["checkpoint"])
        self._exit_code = 0 if succeeded else 1

    def close(self) -> None:
        self._run.finish(exit_code=self._exit_code)
        if self._is_offline:
            wait_until_complete(Path(self._run.settings.sync_file), within_s=_WRITTEN_WITHIN_S)

    def _validated_values(self, row: Row) -> dict[str, Any]:
        """Return the metrics of a validation, which have the checkpoint's step as their axis."""
        values = _values(row.metrics)
        for name in values.keys() - self._validated:
            # W&B refuses an empty name, and reads an asterisk as a pattern.
            if name and "*" not in name:
                self._run.define_metric(name, step_metric=_CHECKPOINT_STEP)
            self._validated.add(name)
        return {**values, _CHECKPOINT_STEP: row.step}

    def _log(self, values: Mapping[str, Any], step: int, at: float) -> None:
        self._run.log({**values, "_timestamp": at}, step=step)
        self._last = step

    def _refer(self, address: str) -> None:
        artifact = self._wandb.Artifact(f"{_artifact_name(self._name)}-checkpoint", type="model")
        uri = address if "://" in address else Path(address).as_uri()
        artifact.add_reference(uri, checksum=False, name=Path(address).name)
        self._run.log_artifact(artifact)


def _remove_offline_run(directory: Path, run_id: str) -> None:
    """Remove the directories of an offline run, but no links or other runs."""
    there = list(os.scandir(directory)) if directory.is_dir() else []
    for each in there:
        named = _OFFLINE_RUN.fullmatch(each.name)
        if named and named[1] == run_id and each.is_dir(follow_symlinks=False):
            shutil.rmtree(each.path)


def _holds_a_secret(argument: str) -> bool:
    name, _, value = argument.partition("=")
    return is_secret(name) or holds_credentials(value) or holds_credentials(argument)


def _values(metrics: Mapping[str, Any]) -> dict[str, Any]:
    text = {name: value for name, value in metrics.items() if isinstance(value, str)}
    found: dict[str, Any] = {**numbers(metrics), **text}
    return {f"x{name}" if name in _RESERVED else name: value for name, value in found.items()}


def _artifact_name(name: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in name)[:100]


def _server() -> str:
    """Return the server's address: the environment's, or where the user has logged in."""
    if given := os.environ.get("WANDB_BASE_URL"):
        return given
    directory = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    settings = configparser.ConfigParser(interpolation=None)
    with contextlib.suppress(configparser.Error, OSError, ValueError):  # wandb passes over it, too
        settings.read(directory / "settings")
    return settings.get("default", "base_url", fallback="") or "https://api.wandb.ai"


def _require_server() -> None:
    """Raise OSError if the server can't be reached.

    After such a failure in wandb itself, it can't reuse a run's id in the same process.
    """
    try:
        urlopen(_server(), timeout=_CONNECT_TIMEOUT_S).close()
    except HTTPError as error:
        # An HTTP error is an answer.
        error.close()


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    file = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        return netrc.netrc(file).authenticators(urlsplit(_server()).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False
