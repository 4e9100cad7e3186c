"""What trainers write: whole lines with the rank in front, and all of it in a log for each rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from polytrain.common.output import Output
from polytrain.ui.progress import WorkerOutput

Captured = pytest.CaptureFixture[str]


def wrote(text: str, *, rank: int = 0, stream: str = "stdout") -> Output:
    return Output(attempt=0, rank=rank, stream=stream, text=text)


def test_every_line_has_its_rank_in_front(tmp_path: Path, capsys: Captured) -> None:
    with WorkerOutput(tmp_path / "logs") as output:
        output.write(wrote("one\ntwo\n", rank=3))
    assert capsys.readouterr().out == "(rank 3) one\n(rank 3) two\n"


def test_streams_stay_apart(tmp_path: Path, capsys: Captured) -> None:
    with WorkerOutput(tmp_path / "logs") as output:
        output.write(wrote("result\n"))
        output.write(wrote("warning\n", stream="stderr"))
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("(rank 0) result\n", "(rank 0) warning\n")


def test_a_line_is_shown_when_it_is_whole(tmp_path: Path, capsys: Captured) -> None:
    with WorkerOutput(tmp_path / "logs") as output:
        output.write(wrote("los"))
        output.write(wrote("other rank\n", rank=1))
        output.write(wrote("to stderr\n", stream="stderr"))
        assert capsys.readouterr().out == "(rank 1) other rank\n"
        output.write(wrote("s 0.5\nnext"))
        assert capsys.readouterr().out == "(rank 0) loss 0.5\n"


def test_a_line_without_an_end_is_shown_when_its_writer_is_gone(
    tmp_path: Path, capsys: Captured
) -> None:
    with WorkerOutput(tmp_path / "logs") as output:
        output.write(wrote("last words"))
        output.flush()
        assert capsys.readouterr().out == "(rank 0) last words\n"
        output.write(wrote("the next attempt's\n"))
        output.write(wrote("never ended"))
    assert capsys.readouterr().out == "(rank 0) the next attempt's\n(rank 0) never ended\n"


def test_what_is_muted_goes_to_the_log_alone(tmp_path: Path, capsys: Captured) -> None:
    with WorkerOutput(tmp_path / "logs") as output:
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
    with WorkerOutput(tmp_path / "logs") as output:
        output.write(wrote("a\n", rank=0))
        output.write(wrote("b é\n", rank=11))
        output.write(wrote("c\n", rank=0, stream="stderr"))
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert logs == {"rank_0.log": "a\nc\n", "rank_11.log": "b é\n"}


def test_nothing_written_leaves_no_log(tmp_path: Path) -> None:
    with WorkerOutput(tmp_path / "logs"):
        pass
    assert list(tmp_path.iterdir()) == []
