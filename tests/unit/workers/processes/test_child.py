"""How a forked process has ended, as it is described."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.linux.test_control_groups import groups

from polytrain.workers.processes import child as module
from polytrain.workers.processes.child import Child

SIGKILLED = "killed by SIGKILL"
PERHAPS = f"{SIGKILLED}, perhaps because the kernel was out of memory,"


@pytest.mark.parametrize(
    ("how", "in_group", "of_machine", "lacked", "explained"),
    [
        (SIGKILLED, 1, 1, True, SIGKILLED),
        # The kernel has killed a process elsewhere.
        (SIGKILLED, 0, 1, False, SIGKILLED),
        (SIGKILLED, None, 1, False, PERHAPS),
        (SIGKILLED, None, 0, False, SIGKILLED),
        ("killed by SIGTERM", 1, 1, False, "killed by SIGTERM"),
        ("killed by SIGTERM", None, 1, False, "killed by SIGTERM"),
    ],
)
def test_a_process_has_lacked_memory_if_its_control_group_counts_that(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    in_group: int | None,
    of_machine: int,
    lacked: bool,
    explained: str,
) -> None:
    """The count of the machine is also that of other containers and users."""

    def count(more: int) -> None:
        files = {} if in_group is None else {"memory.events": f"oom_kill {3 + in_group * more}"}
        monkeypatch.setattr(module, "OWN_GROUPS", groups(tmp_path, "0::/\n", files))
        monkeypatch.setattr(module, "oom_kills", lambda: 7 + of_machine * more)

    count(0)
    child = Child(on_message=print, on_output=None)
    count(1)
    assert (child.lacked_memory(how), child.explained(how)) == (lacked, explained)
    child.discard()
