"""Where lines stay, a run that trains says so more and more rarely."""

from __future__ import annotations

from itertools import accumulate, pairwise, takewhile

from polytrain.view.progress.display import heartbeat_pauses


def test_two_hours_have_few_lines_and_their_first_minute_several() -> None:
    times = list(takewhile(lambda at: at <= 7200, accumulate(heartbeat_pauses())))
    assert 10 <= len(times) <= 20
    assert [at for at in times if at <= 210] == [30, 90, 210]


def test_a_week_has_a_line_at_least_every_ten_minutes() -> None:
    week_s = 7 * 24 * 3600
    times = list(takewhile(lambda at: at <= week_s, accumulate(heartbeat_pauses())))
    pauses = [after - before for before, after in pairwise(times)]
    assert pauses == sorted(pauses)
    assert max(pauses) == 600
