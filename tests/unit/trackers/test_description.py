"""The description of a run that trackers receive at its start."""

from __future__ import annotations

from typing import Any

from polytrain import FailureConfig, RunConfig, ScalingConfig
from polytrain.record.configuration import Configuration, options_of
from polytrain.record.entries import CommitFound, Launched, Opened, RankJoined
from polytrain.record.run_facts import RunFacts
from polytrain.trackers.description import description_of, nested


def opened(token: int = 1, **given: Any) -> Opened:
    configuration = Configuration(**given)
    identity = {"backend": "torch"}
    return Opened(
        token=token, anew=token == 1, identity=identity, world_size=2, configuration=configuration
    )


def joined(rank: int) -> RankJoined:
    return RankJoined(
        token=1, cause="Joined", phase="Training", attempt=0, rank=rank, device="H100", node="a"
    )


def test_the_users_hyperparameters_come_first_and_then_what_was_given() -> None:
    failures = FailureConfig(max_failures=3)
    run = RunConfig(track="csv", failure_config=failures, time_budget_s=60)
    facts = RunFacts()
    facts.take(
        opened(
            hyperparameters={"num_workers": 8, "lr": 0.1},
            options=options_of(ScalingConfig(num_workers=2, use_gpu=True), run),
            datasets={"train": {"rows": 100, "num_columns": None}},
        )
    )
    assert list(description_of(facts).parameters.items()) == [
        ("num_workers", 8),
        ("lr", 0.1),
        ("backend", "torch"),
        # The user's own is the number of threads that load data.
        ("polytrain.num_workers", 2),
        ("scaling_config.use_gpu", True),
        ("run_config.failure_config.max_failures", 3),
        ("run_config.time_budget_s", 60),
        ("datasets.train.rows", 100),
    ]


def test_the_program_is_that_of_the_last_driver() -> None:
    facts = RunFacts()
    facts.take(opened(1, command=["python", "a b.py"], script="/a b.py", versions={"torch": "2"}))
    facts.take(CommitFound(token=1, commit="a" * 40, branch="main", is_dirty=True))
    facts.take(Launched(token=1, attempt=0, step=0, start=None, world_size=2))
    for rank in (0, 1):
        facts.take(joined(rank))
    assert description_of(facts).program == {
        "command": "python 'a b.py'",
        "script": "/a b.py",
        "commit": "a" * 40,
        "branch": "main",
        "changes": "yes",
        "nodes": "a",
        "devices": "2 x H100",
        "version.torch": "2",
    }
    # Another driver resumes the run, from a place without a repository.
    facts.take(opened(2, command=["python", "b.py"]))
    facts.take(CommitFound(token=1, commit="b" * 40))
    assert description_of(facts).commit == ""
    assert [each.commit for each in facts.programs] == ["a" * 40, ""]
    assert facts.programs[0].code == f"{'a' * 12} (main, with changes)"


def test_names_are_nested_unless_another_is_in_their_way() -> None:
    assert nested({"a.b": 1, "a.c.d": 2, "e": 3}) == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert nested({"a": 1, "a.b": 2}) == {"a": 1, "a.b": 2}
    assert nested({"a.b": 2, "a": 1}) == {"a.b": 2, "a": 1}
