"""A tracker that writes event files for TensorBoard, without torch and TensorFlow."""

from __future__ import annotations

import io
import os
import re
import socket
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from polytrain.storage.beneath import Beneath
from polytrain.trackers.description import Description
from polytrain.trackers.tracker import FileTracker, Row, TrackedRun, numbers

_PREFIX = "events.out.tfevents."
_SUFFIX = ".polytrain"
"""Suffix of the tracker's files: others may be beside them."""

_STARTED, _ENDED = "polytrain/run", "polytrain/end"
"""Tags of the texts with what the run was started with, and with its end."""


@dataclass(frozen=True)
class TensorBoard(FileTracker):
    """Writes scalars that TensorBoard shows: `tensorboard --logdir DIRECTORY`.

    A restart undoes the steps after its checkpoint: TensorBoard shows only their last repetition.
    A run that is started over replaces its files. Numbers have 32 bits. Metrics that aren't numbers
    are left out.

    Args:
        directory: the log directory, in which the run has a directory of its name; by default
            `tensorboard` in the run's directory.
        system_metrics: whether a row also has how busy each rank was, and its CPU use, memory and
            GPUs, if they were measured since the row before: every
            `FailureConfig.straggler_window_s` seconds.
    """

    name: ClassVar[str] = "tensorboard"
    requires: ClassVar[tuple[str, ...]] = ("tensorboard",)
    _option: ClassVar[str] = "directory"
    _usual: ClassVar[str] = "tensorboard"

    directory: str | None = None
    system_metrics: bool = False

    def open(self, run: TrackedRun) -> EventFiles:
        """Open the run's directory.

        Raises:
            FileExistsError: it has files of another run with this name.
        """
        if self.directory is not None:
            files = EventFiles(Path(self.directory, run.name), "")
            if not run.run_id and any(files.event_files()):
                raise FileExistsError(
                    f"{files.run_id} has event files that aren't of this run: give another "
                    "directory, or move them away"
                )
            return files
        if run.directory is None:
            raise ValueError(f"{run.address} isn't a directory: give TensorBoard a log directory")
        return EventFiles(run.directory, self._usual)


class EventFiles:
    """A directory of event files. This process writes the last one."""

    sent: int | None = None

    def __init__(self, root: Path, below: str) -> None:
        """
        Args:
            root: a directory that the user has named, or the run's.
            below: the files' directory in it; empty for the root itself.
        """
        # Don't import `tensorboard.summary` itself, which imports TensorFlow if it is installed.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.run_id = str(root / below)
        self._root = Beneath(root)
        self._below = below
        self._event, self._session = event_pb2.Event, event_pb2.SessionLog
        self._summary, self._metadata = summary_pb2.Summary, summary_pb2.SummaryMetadata
        self._record_writer = RecordWriter
        self._hparams, self._hparams_data = metadata, plugin_data_pb2
        self._status = {True: api_pb2.STATUS_SUCCESS, False: api_pb2.STATUS_FAILURE}
        self._file: int | None = None
        self._description: Description | None = None
        self._last_stamp = 0
        """Newest time stamp of removed files, which TensorBoard may have read."""

        with self._root.directory(below, make=True):
            pass

    def describe(self, description: Description) -> None:
        self._description = description
        # Otherwise the next file begins with it: the first rows may replace all files.
        if self._file is not None:
            self._append(self._described())

    def write(self, rows: Sequence[Row]) -> None:
        if self._file is None:
            # Remove steps that an earlier process wrote but couldn't note: they are sent again.
            self.rewind(rows[0].step - 1)
        self._append(map(self._scalars, rows))

    def rewind(self, step: int) -> None:
        if step == 0:
            self._remove_files()
        # At a new start record TensorBoard drops these steps; its server does so at any but the
        # first. So every file has one.
        start = self._session(status=self._session.START)
        first = step + 1 if step else 0
        self._append([self._event(wall_time=time.time(), step=first, session_log=start)])

    def amend(self, row: Row) -> None:
        self._append([self._scalars(row)])

    def finish(self, summary: Mapping[str, Any], *, succeeded: bool) -> None:
        ended = self._hparams_data.SessionEndInfo(
            status=self._status[succeeded],
            end_time_secs=time.time(),
        )
        tag = self._hparams.SESSION_END_INFO_TAG
        hparams = self._hparams_value(tag, session_end_info=ended)
        self._append([self._summary_event(self._table(_ENDED, summary), hparams)])

    def close(self) -> None:
        if self._file is not None:
            os.fsync(self._file)
            os.close(self._file)
            self._file = None

    def _scalars(self, row: Row) -> Any:
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in numbers(row.metrics).items()
        ]
        return self._event(wall_time=row.time, step=row.step, summary=self._summary(value=values))

    def _described(self) -> list[Any]:
        """Return the events with what the run was started with: a text, and hyperparameters."""
        if self._description is None:
            return []
        parameters = self._description.parameters
        started = self._hparams_data.SessionStartInfo(start_time_secs=time.time())
        for name, value in parameters.items():
            if isinstance(value, bool):
                started.hparams[name].bool_value = value
            elif isinstance(value, int | float):
                started.hparams[name].number_value = value
            else:
                started.hparams[name].string_value = str(value)
        tag = self._hparams.SESSION_START_INFO_TAG
        hparams = self._hparams_value(tag, session_start_info=started)
        text = self._table(_STARTED, {**parameters, **self._description.program})
        return [self._summary_event(text, hparams)]

    def _summary_event(self, *values: Any) -> Any:
        return self._event(wall_time=time.time(), summary=self._summary(value=values))

    def _table(self, tag: str, values: Mapping[str, Any]) -> Any:
        lines = ["| | |", "|---|---|"]
        for name, value in values.items():
            cells = (str(each).replace("|", "\\|").replace("\n", " ") for each in (name, value))
            lines.append(f"| {' | '.join(cells)} |")
        text = self._summary.Value(tag=f"{tag}/text_summary")
        text.metadata.CopyFrom(
            self._metadata(plugin_data=self._metadata.PluginData(plugin_name="text"))
        )
        text.tensor.dtype = 7  # a string
        text.tensor.string_val.append("\n".join(lines).encode())
        return text

    def _hparams_value(self, tag: str, **content: Any) -> Any:
        """Return what the tab HPARAMS reads."""
        data = self._hparams_data.HParamsPluginData(
            version=self._hparams.PLUGIN_DATA_VERSION, **content
        )
        value = self._summary.Value(tag=tag, tensor=self._hparams.NULL_TENSOR)
        value.metadata.CopyFrom(self._hparams.create_summary_metadata(data))
        return value

    def _append(self, events: Iterable[Any]) -> None:
        """Append events in one write, so that a process that dies leaves no partial event."""
        text = io.BytesIO()
        writer = self._record_writer(text)
        if self._file is None:
            header = self._event(wall_time=time.time(), file_version="brain.Event:2")
            writer.write(header.SerializeToString())
            events = [*events, *self._described()]
        for event in events:
            writer.write(event.SerializeToString())
        if self._file is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
            self._file = self._root.open(self._path(self._next_name()), flags)
        left = text.getvalue()
        while left:
            left = left[os.write(self._file, left) :]

    def _remove_files(self) -> None:
        """Remove the tracker's files: the run was started over, or keeps no rows."""
        self._last_stamp = self._newest_stamp()
        self.close()
        for name in self.event_files():
            self._root.delete(self._path(name))

    def event_files(self) -> Iterator[str]:
        """Yield the names of polytrain's event files, of whichever run."""
        for name, status in self._root.names(self._below, start=_PREFIX):
            if name.endswith(_SUFFIX) and stat.S_ISREG(status.st_mode):
                yield name

    def _newest_stamp(self) -> int:
        names = (name for name, _ in self._root.names(self._below, start=_PREFIX))
        stamps = (name.removeprefix(_PREFIX).partition(".")[0] for name in names)
        known = (int(stamp) for stamp in stamps if re.fullmatch("[0-9]{1,18}", stamp))
        return max(known, default=self._last_stamp)

    def _path(self, name: str) -> str:
        return f"{self._below}/{name}" if self._below else name

    def _next_name(self) -> str:
        # Files are read in the order of their names, so don't rely on the machines' clocks.
        stamp = max(int(time.time()), self._newest_stamp() + 1)
        return f"{_PREFIX}{stamp:010d}.{socket.gethostname()}{_SUFFIX}"
