"""A rank that writes without end fills no memory, and is told what was left out."""

from __future__ import annotations

from polytrain.workers.processes.output_pipe import BURST, PER_SECOND, OutputLimit

CHUNK = "y\n" * 32_768


def test_what_is_usual_passes() -> None:
    limit = OutputLimit(now=0.0)
    assert [limit.passed("line\n", now=float(second)) for second in range(100)] == ["line\n"] * 100
    assert limit.notice() == ""


def test_a_burst_passes_and_a_flood_is_cut_off_and_reported_about_once_a_second() -> None:
    limit = OutputLimit(now=0.0)
    chunks = [limit.passed(CHUNK, now=number / 1000) for number in range(10_000)]
    passed = "".join(chunks)
    assert passed.startswith(CHUNK * (BURST // len(CHUNK)))
    assert len(passed) < BURST + 11 * PER_SECOND
    notices = [line for line in passed.splitlines() if line != "y"]
    assert 8 <= len(notices) <= 11
    assert all("of what this process has written is left out" in line for line in notices)


def test_nothing_is_left_out_silently() -> None:
    """Neither of the output nor of what is said of it."""
    limit = OutputLimit(now=0.0)
    passed = [limit.passed(CHUNK, now=0.0) for _ in range(2 * BURST // len(CHUNK))]
    left_out = len(CHUNK) * passed.count("")
    assert left_out == BURST
    assert f"{left_out / 1e6:.1f} MB of what" in limit.notice()
    assert limit.notice() == ""


def test_a_notice_is_a_line_of_its_own() -> None:
    limit = OutputLimit(now=0.0)
    assert limit.passed("no end", now=0.0) == "no end"
    assert limit.passed("x" * (BURST + 1), now=0.0) == ""
    first, notice, second = limit.passed("more\n", now=60.0).splitlines()
    assert (first, second) == ("", "more")
    assert notice.startswith("[polytrain: 8.4 MB of what")
