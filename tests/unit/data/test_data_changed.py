"""A position inside an epoch means nothing in other data: what has changed is named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.shards import shard_of

import polytrain.data.fingerprint
from polytrain.data.plan.position import DataChangedError

Change = Callable[[Path], Any]


def table(**columns: list[Any]) -> pa.Table:
    return pa.table({"x": [1, 2, 3, 4], "y": list("abcd"), **columns})


def files(directory: Path, ending: str = "parquet") -> list[Path]:
    """Two files of two rows each."""
    found = []
    for name, rows in (("a", [1, 2]), ("b", [3, 4])):
        found.append(directory / f"{name}.{ending}")
        if not found[-1].exists():
            write(found[-1], rows)
    return found


def write(path: Path, rows: list[int]) -> None:
    if path.suffix == ".csv":
        pd.DataFrame({"x": rows}).to_csv(path, index=False)
    else:
        pq.write_table(pa.table({"x": rows}), path)


def csv_files(directory: Path) -> list[Path]:
    return files(directory, "csv")


def turned(directory: Path) -> Any:
    return files(directory)[::-1]


def renamed(directory: Path) -> Any:
    first, second = files(directory)
    first.rename(directory / "c.parquet")
    return [directory / "c.parquet", second]


def copied(directory: Path) -> Any:
    """The files, with times of their own."""
    copies = [directory / "copies" / file.name for file in files(directory)]
    copies[0].parent.mkdir()
    for file, copy in zip(files(directory), copies, strict=True):
        shutil.copyfile(file, copy)
    return copies


def touched(directory: Path) -> Any:
    for file in files(directory):
        os.utime(file, ns=(0, 10**18))
    return files(directory)


def of_another_day(directory: Path) -> Any:
    """Values that rows have from the names of directories."""
    (directory / "day=1").rename(directory / "day=2")
    return directory / "day=2"


def of_a_day(directory: Path) -> Any:
    (directory / "day=1").mkdir()
    files(directory / "day=1")
    return directory / "day=1"


def swapped(directory: Path) -> Any:
    first, second = files(directory)
    os.utime(first, ns=(0, 10**18))
    first.rename(directory / "between")
    second.rename(first)
    (directory / "between").rename(second)
    return [first, second]


def moved(directory: Path) -> Any:
    (directory / "v2").mkdir()
    return [file.rename(directory / "v2" / file.name) for file in files(directory)]


def replaced(directory: Path) -> Any:
    """Files of the same sizes and times with another value."""
    for file in files(directory, "csv"):
        times = file.stat()
        file.write_text(file.read_text().replace("1", "5"))
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    return files(directory, "csv")


def rewritten(ending: str) -> Change:
    def change(directory: Path) -> Any:
        first, second = files(directory, ending)
        write(first, [7, 8])
        os.utime(first, ns=(0, 10**18))
        return [first, second]

    return change


CHANGED: dict[str, tuple[Change, Change, str]] = {
    "files in another order": (files, turned, "other order of files"),
    "a file that is replaced unseen": (csv_files, replaced, "other contents of files"),
    "other values from names": (of_a_day, of_another_day, "other names of files"),
    "a renamed file that comes last now": (
        files,
        lambda directory: renamed(directory)[::-1],
        "other names of files; other order of files",
    ),
    "files of a table": (
        lambda directory: table(),
        files,
        ".*; a table then, files now",
    ),
    "files that swapped their names": (files, swapped, "other sizes or times of files"),
    "a file more": (
        files,
        lambda directory: [*files(directory), *files(directory, "more.parquet")[:1]],
        "rows=4 then, 6 now; other files",
    ),
    "a rewritten file": (files, rewritten("parquet"), "other sizes or times of files"),
    "a rewritten CSV file": (csv_files, rewritten("csv"), "other sizes or times of files"),
    "another value": (
        lambda directory: table(),
        lambda directory: table(y=["a", "b", "c", "e"]),
        "other column 'y'",
    ),
    "rows in another order": (
        lambda directory: table(),
        lambda directory: table().take([1, 0, 2, 3]),
        "other column 'x'; other column 'y'",
    ),
    "another array": (
        lambda directory: {"x": [1, 2, 3, 4]},
        lambda directory: {"x": [1, 2, 3, 5]},
        "other column 'x'",
    ),
}


def position_in(data: Any, **config: Any) -> Any:
    """After the first batch of an epoch, as a manifest has it."""
    shard = shard_of(data, **config)
    for _ in shard.iter_batches(batch_size=1):
        return json.loads(json.dumps(shard.cursor.position.to_plain()))
    raise AssertionError("no batch")


@pytest.mark.parametrize("case", CHANGED)
def test_an_epoch_does_not_go_on_in_other_data(case: str, tmp_path: Path) -> None:
    make, change, found = CHANGED[case]
    position = position_in(make(tmp_path))
    with pytest.raises(DataChangedError, match=rf"row 1 of epoch 0 of .*'train'.*\({found}\)"):
        shard_of(change(tmp_path), position=position)


@pytest.mark.parametrize("case", CHANGED)
def test_the_next_epoch_may_be_of_other_data(case: str, tmp_path: Path) -> None:
    make, change, _ = CHANGED[case]
    shard = shard_of(make(tmp_path))
    list(shard.iter_batches())
    data = change(tmp_path)
    again = shard_of(data, position=shard.cursor.position.to_plain())
    assert again.cursor.position.epoch == 1
    # From there on it is these that are meant.
    position = again.cursor.position.moved(1, 2).to_plain()
    assert shard_of(data, position=position).cursor.position.start == 2


SAME: dict[str, tuple[Change, dict[str, Any], Change, dict[str, Any]]] = {
    "files": (files, {}, files, {}),
    "a directory of the same files": (files, {}, lambda directory: directory, {}),
    "a renamed file": (files, {}, renamed, {}),
    "moved files": (files, {}, moved, {}),
    "copied files": (files, {}, copied, {}),
    "touched files": (files, {}, touched, {}),
    "CSV files": (csv_files, {}, csv_files, {}),
    "a table": (lambda _: table(), {}, lambda _: table(), {}),
    "a table in chunks": (
        lambda _: table(),
        {},
        lambda _: pa.concat_tables([table().slice(0, 1), table().slice(1)]),
        {},
    ),
    "a frame": (lambda _: table().to_pandas(), {}, lambda _: table().to_pandas(), {}),
    "other columns": (lambda _: table(), {}, lambda _: table(), {"columns": ["y"]}),
    "a transform": (lambda _: table(), {}, lambda _: table(), {"transform": dict}),
}


@pytest.mark.parametrize("case", SAME)
def test_an_epoch_goes_on_in_the_same_data(case: str, tmp_path: Path) -> None:
    make, config, again, other_config = SAME[case]
    position = position_in(make(tmp_path), **config)
    shard = shard_of(again(tmp_path), position=position, **other_config)
    assert sum(len(next(iter(b.values()))) for b in shard.iter_batches(batch_size=1)) == 3


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polytrain.data.fingerprint, "_WHOLE_BYTES", 0)
    monkeypatch.setattr(polytrain.data.fingerprint, "_BLOCK_BYTES", 1)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("again", [files, renamed, moved, lambda directory: directory])
def test_large_files_may_be_moved_with_their_times(again: Change, tmp_path: Path) -> None:
    position = position_in(files(tmp_path))
    assert shard_of(again(tmp_path), position=position).cursor.position.start == 1


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (turned, "other order of files"),
        (touched, "other sizes or times of files"),
        (copied, "other files"),
        (rewritten("parquet"), "other sizes or times of files"),
    ],
)
def test_large_files_are_not_read_whole_to_know_them(
    change: Change, found: str, tmp_path: Path
) -> None:
    position = position_in(files(tmp_path))
    with pytest.raises(DataChangedError, match=rf"\({found}\)"):
        shard_of(change(tmp_path), position=position)


@pytest.mark.usefixtures("large")
def test_a_sample_of_large_files_is_read(tmp_path: Path) -> None:
    position = position_in(csv_files(tmp_path))
    with pytest.raises(DataChangedError, match="other sampled contents of files"):
        shard_of(replaced(tmp_path), position=position)
