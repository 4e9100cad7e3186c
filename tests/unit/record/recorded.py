"""A journal of a run with a failure, a resize and a second driver, and the facts it tells."""

from __future__ import annotations

from typing import Any

from polytrain.record.entries import FORMAT
from polytrain.record.history import read_as
from polytrain.text import strict_json
from polytrain.view.page.facts import Facts, Source, facts_of
from polytrain.view.present import RunRecord
from polytrain.view.run_state import RunState

Line = dict[str, Any]

LOST = {
    "kind": "WORKER_LOST",
    "rank": 1,
    "step": 3,
    "message": "killed by SIGKILL",
    "traceback": "",
    "host": "b",
    "output": "Segmentation fault",
    "last_lines": ["reading", "last words"],
    "stacks": {"0": "waits at 0x7f01", "1": "works", "2": "waits at 0x7f02"},
}


def line(time: float, event: str, *, token: int = 1, **more: Any) -> Line:
    return {"time": time, "token": token, "event": event, **more}


SETTINGS = {"scaling_config.num_workers": 3, "run_config.track": "mlflow", "later.option": 1}

CONFIGURATION = {
    "options": SETTINGS,
    "datasets": {},
    "versions": {"torch": "2.9"},
    "cluster": "on Ray: a driver is connected to it",
    "of a later version": True,
}


def opened(time: float, *, token: int = 1, anew: bool = True) -> Line:
    identity = {"backend": "reference", "options": {"rounds": 3}, "datasets": {}}
    return line(
        time,
        "Opened",
        token=token,
        format=FORMAT,
        anew=anew,
        identity=identity,
        world_size=3,
        began=time,
        configuration=CONFIGURATION,
    )


def attempt(
    time: float, number: int, *, token: int = 1, step: int = 0, size: int = 3
) -> list[Line]:
    return [
        line(time, "AgentsPlaced", token=token, phase="Gathering", attempt=number, reason="placed"),
        line(
            time,
            "Launched",
            token=token,
            attempt=number,
            step=step,
            start=None,
            world_size=size,
            hosts=[["a", "c"], ["a", "b", "b"]][size == 3][:size],
            gpus=[0, 1, 1][:size],
        ),
        line(time, "Offered", token=token, phase="Training", attempt=number, reason="offered"),
        *(
            line(
                time,
                "Joined",
                token=token,
                phase="Training",
                attempt=number,
                reason=f"rank {rank} joined",
                rank=rank,
                rows={"train": 10 + rank},
                device=["CPU", "NVIDIA L4", "NVIDIA L4"][rank % 3],
                node=f"node-{rank % 3}",
            )
            for rank in range(size)
        ),
    ]


def report(time: float, n: int, step: int, *, token: int = 1) -> Line:
    return line(time, "Reported", token=token, n=n, step=step, metrics={"loss": time})


RUN = [
    opened(0),
    *attempt(1, 0),
    report(2, 0, 1),
    line(2, "Committed", checkpoint="checkpoint_000000-1.0", step=1),
    report(3, 1, 2),
    report(4, 2, 3),
    line(4, "Load", attempt=0, window=0, busy=[0.5, 1.0, 0.0], memory=[5, 6, 7]),
    line(4, "Straggler", attempt=0, rank=2, host="b", reason="rank 2 is slow"),
    line(5, "Exited", phase="Ending", attempt=0, reason="rank 1"),
    line(6, "AttemptEnded", attempt=0, failure=LOST, reason="failure 1 of 1"),
    *attempt(7, 1, step=1, size=2),
    report(8, 3, 2),
    report(9, 4, 3),
    # This driver dies, and a later one resumes the run.
    opened(100, token=2, anew=False),
    *attempt(101, 0, token=2, step=1, size=2),
    line(
        102,
        "Load",
        token=2,
        attempt=0,
        window=0,
        busy=[0.3, 1.0],
        gpus=[[], [[0.9, 7], [None, 2]]],
        cpu=[2.5, 0.5],
        memory=[9, 4],
    ),
    report(102, 0, 2, token=2),
    line(103, "Concluded", token=2, succeeded=True, stopped=None, reason="every rank finished"),
    line(104, "Closed", token=2),
]


def journal(lines: list[Line]) -> list[bytes]:
    return ["".join(strict_json.dumps(each) + "\n" for each in lines).encode()]


def page_of(lines: list[Line], state: RunState = RunState.FINISHED) -> Facts:
    record = read_as(RunRecord, journal(lines))
    assert record is not None
    source = Source(name="run", path="/r", state=state, driver=None, read=0.0, version="1")
    return facts_of(record, source)
