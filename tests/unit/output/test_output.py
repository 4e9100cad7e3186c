"""What trainers write: whole lines with the rank in front, and all of it in a log for each rank."""

from __future__ import annotations

import errno
import io
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from tests.descriptors import opened, since

from polytrain.errors import Failure, FailureKind, TrainingFailedError
from polytrain.events.output import Output
from polytrain.output.worker_output import WorkerOutput

Captured = pytest.CaptureFixture[str]


def wrote(text: str, *, rank: int = 0, stream: str = "stdout") -> Output:
    return Output(attempt=0, rank=rank, stream=stream, text=text)


def lost(rank: int | None) -> Failure:
    return Failure(kind=FailureKind.WORKER_LOST, rank=rank, message="killed by SIGKILL")


def test_every_line_has_its_rank_in_front(tmp_path: Path, capsys: Captured) -> None:
    with WorkerOutput(tmp_path / "logs", retry_s=30) as output:
        output.write(wrote("one\ntwo\n", rank=3))
    assert capsys.readouterr().out == "(rank 3) one\n(rank 3) two\n"


@pytest.mark.parametrize(("show", "shown"), [("all", [0, 1]), ("rank_0", [0]), ("none", [])])
def test_the_user_chooses_whose_output_is_shown(
    tmp_path: Path, capsys: Captured, show: Literal["all", "rank_0", "none"], shown: list[int]
) -> None:
    with WorkerOutput(tmp_path / "logs", retry_s=30, show=show) as output:
        for rank in (0, 1):
            output.write(wrote("out\n", rank=rank))
            output.write(wrote("err\n", rank=rank, stream="stderr"))
        assert output.log_of(lost(1)) == str(tmp_path / "logs" / "rank_1.log")
        assert output.log_of(lost(2)) == ""
    captured = capsys.readouterr()
    assert captured.out == "".join(f"(rank {rank}) out\n" for rank in shown)
    assert captured.err == "".join(f"(rank {rank}) err\n" for rank in shown)
    for rank in (0, 1):
        assert (tmp_path / "logs" / f"rank_{rank}.log").read_text() == "out\nerr\n"


def test_streams_stay_apart(tmp_path: Path, capsys: Captured) -> None:
    with WorkerOutput(tmp_path / "logs", retry_s=30) as output:
        output.write(wrote("result\n"))
        output.write(wrote("warning\n", stream="stderr"))
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("(rank 0) result\n", "(rank 0) warning\n")


def test_a_line_is_shown_when_it_is_whole(tmp_path: Path, capsys: Captured) -> None:
    with WorkerOutput(tmp_path / "logs", retry_s=30) as output:
        output.write(wrote("los"))
        output.write(wrote("other rank\n", rank=1))
        output.write(wrote("to stderr\n", stream="stderr"))
        assert capsys.readouterr().out == "(rank 1) other rank\n"
        output.write(wrote("s 0.5\nnext"))
        assert capsys.readouterr().out == "(rank 0) loss 0.5\n"


def test_a_line_without_an_end_is_shown_when_its_writer_is_gone(
    tmp_path: Path, capsys: Captured
) -> None:
    with WorkerOutput(tmp_path / "logs", retry_s=30) as output:
        output.write(wrote("last words"))
        output.flush()
        assert capsys.readouterr().out == "(rank 0) last words\n"
        output.write(wrote("the next attempt's\n"))
        output.write(wrote("never ended"))
    assert capsys.readouterr().out == "(rank 0) the next attempt's\n(rank 0) never ended\n"


def test_what_is_muted_goes_to_the_log_alone(tmp_path: Path, capsys: Captured) -> None:
    with WorkerOutput(tmp_path / "logs", retry_s=30) as output:
        output.write(wrote("shown\n"))
        output.muted = True
        output.write(wrote("noise of a broken collective\nand more"))
        output.flush()
        output.muted = False
        output.write(wrote("shown again\n"))
    assert capsys.readouterr().out == "(rank 0) shown\n(rank 0) shown again\n"
    assert (tmp_path / "logs" / "rank_0.log").read_text() == (
        "shown\nnoise of a broken collective\nand moreshown again\n"
    )


def test_each_rank_has_a_log_of_its_own(tmp_path: Path) -> None:
    with WorkerOutput(tmp_path / "logs", retry_s=30) as output:
        output.write(wrote("a\n", rank=0))
        output.write(wrote("b é\n", rank=11))
        output.write(wrote("c\n", rank=0, stream="stderr"))
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert logs == {"rank_0.log": "a\nc\n", "rank_11.log": "b é\n"}


def test_a_log_that_is_deleted_to_make_room_begins_anew(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "rank_0.log"
    with WorkerOutput(tmp_path / "logs", retry_s=30) as output:
        output.write(wrote("of last week\n"))
        log.unlink()
        output.write(wrote("of this week\n"))
    assert log.read_text() == "of this week\n"


def test_nothing_written_leaves_no_log(tmp_path: Path) -> None:
    with WorkerOutput(tmp_path / "logs", retry_s=30):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_bar_of_progress_is_one_line_and_all_of_it_is_in_the_log(
    tmp_path: Path, capsys: Captured
) -> None:
    with WorkerOutput(tmp_path / "logs", retry_s=30) as output:
        for done in (10, 50, 100):
            output.write(wrote(f"\r{done}%"))
        output.write(wrote("\n"))
    assert capsys.readouterr().out == "(rank 0) 100%\n"
    assert (tmp_path / "logs" / "rank_0.log").read_bytes() == b"\r10%\r50%\r100%\n"


def test_the_traceback_of_a_rank_is_in_its_log_and_not_shown_twice(
    tmp_path: Path, capsys: Captured
) -> None:
    with WorkerOutput(tmp_path / "logs", retry_s=30) as output:
        output.write(wrote("before\n", rank=1))
        output.log_traceback(
            Failure(
                kind=FailureKind.USER_ERROR,
                rank=1,
                message="ValueError: no",
                traceback="Traceback:\n  …\nValueError: no\n",
            )
        )
    log = (tmp_path / "logs" / "rank_1.log").read_text()
    assert log == "before\n\nTraceback:\n  …\nValueError: no\n"
    assert "ValueError" not in capsys.readouterr().out


def test_a_bar_that_takes_itself_away_leaves_no_line(tmp_path: Path, capsys: Captured) -> None:
    with WorkerOutput(tmp_path / "logs", retry_s=30) as output:
        output.write(wrote("\r50%\r   \r"))
    assert capsys.readouterr().out == ""


class Broken(io.TextIOBase):
    """A standard output whose reader is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def closed() -> io.TextIOBase:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stdout", [Broken(), closed(), None], ids=["broken", "closed", "none"])
def test_a_standard_output_that_is_gone_is_reported_once_and_ends_nothing(
    stdout: io.TextIOBase | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: Captured,
) -> None:
    """`python train.py | head`: the run goes on, and its logs have what isn't shown."""
    monkeypatch.setattr(sys, "stdout", stdout)
    with WorkerOutput(tmp_path / "logs", retry_s=30) as output:
        output.write(wrote("one\ntwo\n"))
        output.write(wrote("error\n", stream="stderr"))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (stdout is not None)
    assert str(tmp_path / "logs") in caplog.text or stdout is None
    assert capsys.readouterr().err == "(rank 0) error\n"
    assert (tmp_path / "logs" / "rank_0.log").read_text() == "one\ntwo\nerror\n"


def test_a_terminal_without_a_character_shows_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    with WorkerOutput(tmp_path / "logs", retry_s=30) as output:
        output.write(wrote("é 50%\n"))
    assert written.getvalue() == b"(rank 0) \\xe9 50%\n"
    assert (tmp_path / "logs" / "rank_0.log").read_text(encoding="utf-8") == "é 50%\n"


def test_a_log_that_cannot_be_written_is_reported_once_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: Captured
) -> None:
    logs = tmp_path / "logs"
    logs.write_text("no directory")
    with WorkerOutput(logs, retry_s=30) as output:
        output.write(wrote("one\n"))
        output.write(wrote("two\n"))
        logs.unlink()
        output.write(wrote("three\n"))
    assert capsys.readouterr().out == "(rank 0) one\n(rank 0) two\n(rank 0) three\n"
    [record] = caplog.records
    assert "rank 0" in record.message
    assert "Not a directory" in record.message
    assert (logs / "rank_0.log").read_text() == (
        "[polytrain: 8 bytes are missing here: they couldn't be written]\nthree\n"
    )


def test_a_log_on_a_full_disk_ends_nothing(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.write", Failing(at=range(9), number=errno.ENOSPC))
    monkeypatch.setattr("polytrain.storage.calls._sleep", no_wait)
    with WorkerOutput(tmp_path / "logs", retry_s=600) as output:
        output.write(wrote("one\n"))
        output.write(wrote("two\n"))
    assert capsys.readouterr().out == "(rank 0) one\n(rank 0) two\n"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left" in caplog.text


def no_wait(*_: object) -> None:
    raise AssertionError("a run that has ended is held up by its logs")


class Failing:
    """`os.write` on a disk that fails at some calls, after it has taken a part."""

    def __init__(self, at: range, number: int = errno.EIO) -> None:
        self._write, self._at, self._calls, self._number = os.write, at, 0, number

    def __call__(self, descriptor: int, data: bytes) -> int:
        if not os.readlink(f"/proc/self/fd/{descriptor}").endswith(".log"):
            return self._write(descriptor, data)
        self._calls += 1
        if self._calls - 1 in self._at:
            raise OSError(self._number, os.strerror(self._number))
        return self._write(descriptor, data[:5])


def test_a_passing_error_of_the_logs_storage_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logs = tmp_path / "logs"
    with WorkerOutput(logs, retry_s=30) as output:
        output.write(wrote("one\n"))
        monkeypatch.setattr("os.write", Failing(at=range(1, 2)))
        output.write(wrote("two, three\n"))
        output.write(wrote("four\n"))
    assert (logs / "rank_0.log").read_text() == "one\ntwo, three\nfour\n"
    assert "missing" not in caplog.text


def test_a_log_is_opened_again_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server that was replaced knows no file that was open before."""
    logs = tmp_path / "logs"
    with WorkerOutput(logs, retry_s=30) as output:
        output.write(wrote("one\n"))
        (logs / "rank_0.log").rename(logs / "before.log")
        (logs / "rank_0.log").write_text("one\n")
        monkeypatch.setattr("os.write", Failing(at=range(1), number=errno.ESTALE))
        output.write(wrote("two\n"))
    assert (logs / "rank_0.log").read_text() == "one\ntwo\n"


def test_nothing_is_called_missing_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NFS says at the close, too, that a file can't be written."""
    close = os.close

    def fails(descriptor: int) -> None:
        is_log = os.readlink(f"/proc/self/fd/{descriptor}").endswith(".log")
        close(descriptor)
        if is_log:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    logs = tmp_path / "logs"
    with WorkerOutput(logs, retry_s=30) as output:
        output.write(wrote("one\n"))
        with monkeypatch.context() as patch:
            patch.setattr("os.write", Failing(at=range(1)))
            patch.setattr("os.close", fails)
            output.write(wrote("two\n"))
    assert (logs / "rank_0.log").read_text() == "one\ntwo\n"
    assert "missing" not in caplog.text


def test_an_error_that_is_there_at_the_end_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "logs"
    with WorkerOutput(logs, retry_s=30) as output:
        output.write(wrote("one\n"))
        monkeypatch.setattr("os.write", Failing(at=range(2)))
        output.write(wrote("two\n"))
    assert (logs / "rank_0.log").read_text() == "one\ntwo\n"


def test_an_error_that_lasts_costs_lines_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logs, now = tmp_path / "logs", [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with WorkerOutput(logs, retry_s=30) as output:
        output.write(wrote("one\n"))
        monkeypatch.setattr("os.write", Failing(at=range(2)))
        output.write(wrote("two\n"))
        assert caplog.records == []
        now[0] += 31
        output.write(wrote("three\n"))
        output.write(wrote("four\n"))
    [record] = caplog.records
    assert "rank 0" in record.message
    assert "Input/output error" in record.message
    assert (logs / "rank_0.log").read_text() == (
        "one\n[polytrain: 10 bytes are missing here: they couldn't be written]\nfour\n"
    )


def test_what_waits_for_the_logs_storage_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logs, now, megabyte = tmp_path / "logs", [100.0], "x" * ((1 << 20) - 1) + "\n"
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with WorkerOutput(logs, retry_s=30) as output:
        output.muted = True
        with monkeypatch.context() as patch:
            patch.setattr("os.write", Failing(at=range(99)))
            for _ in range(40):
                output.write(wrote(megabyte))
    [record] = caplog.records
    assert "rank 0" in record.message
    note, _, kept = (logs / "rank_0.log").read_text().partition("\n")
    assert note == f"[polytrain: {8 << 20} bytes are missing here: they couldn't be written]"
    assert kept == 32 * megabyte


def test_a_long_last_line_is_cut_and_the_log_has_all_of_it(tmp_path: Path) -> None:
    with WorkerOutput(tmp_path / "logs", retry_s=30, show="none") as output:
        output.write(wrote("x" * 90_000 + "\n", rank=0))
        [last] = output.last_lines(lost(0))
    assert len(last) == 2000
    assert last.endswith("x…")
    assert (tmp_path / "logs" / "rank_0.log").stat().st_size == 90_001


def test_the_last_lines_of_a_rank_are_those_before_its_peers_were_lost(tmp_path: Path) -> None:
    with WorkerOutput(tmp_path / "logs", retry_s=30, show="none") as output:
        output.write(wrote("".join(f"line {number}\n" for number in range(20)), rank=1))
        output.write(wrote("no end", rank=1, stream="stderr"))
        output.flush()
        output.muted = True
        output.write(wrote("noise\n", rank=1))
        assert output.last_lines(lost(1)) == (
            *(f"line {number}" for number in range(11, 20)),
            "no end",
        )
        assert output.last_lines(lost(0)) == ()
        output.begin_attempt()
        assert output.last_lines(lost(1)) == ()


def test_a_failure_of_no_process_has_none_of_a_validations_output(tmp_path: Path) -> None:
    with WorkerOutput(tmp_path / "logs", retry_s=30, show="none") as output:
        output.write(Output(attempt=0, rank=None, stream="stdout", text="validates\n"))
        of_storage = Failure(kind=FailureKind.STORAGE, rank=None, message="OSError: disk full")
        assert (output.log_of(of_storage), output.last_lines(of_storage)) == ("", ())
        of_validation = replace(of_storage, kind=FailureKind.VALIDATION)
        assert output.log_of(of_validation).endswith("validation.log")
        assert output.last_lines(of_validation) == ("validates",)
        error = TrainingFailedError("", (of_validation,), last_lines=("validates",))
        assert "The last lines of validations:\n    validates" in str(error)


def test_more_ranks_write_than_a_process_may_open_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By default a process may open 1024 files, and the checkpoints of the run need some."""
    before = opened()
    with WorkerOutput(tmp_path / "logs", retry_s=30, show="none") as output:
        for text in ("begins\n", "trains\n"):
            for rank in range(600):
                output.write(wrote(text, rank=rank))
        assert len(since(before)) < 200
    # What earlier tests have left is closed at any time, and its number is free then.
    assert since(before) == {}
    logs = [tmp_path / "logs" / f"rank_{rank}.log" for rank in range(600)]
    assert {log.read_text() for log in logs} == {"begins\ntrains\n"}
    assert not caplog.records
