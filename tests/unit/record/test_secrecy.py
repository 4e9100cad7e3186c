"""What is secret by its name is neither stored nor shown, and functions still get it."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import polytrain
from polytrain import (
    InvalidJobError,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    ValidationConfig,
    make_trainer,
)
from polytrain.config.runtime_env import runtime_env_problems
from polytrain.config.validation_config import ValidationTaskConfig, validation_of_report
from polytrain.record.configuration import (
    Configuration,
    digests,
    options_of,
    shown,
    without_secrets,
)
from polytrain.record.entries import Opened
from polytrain.record.run_facts import RunFacts
from polytrain.run.identity import salt_of
from polytrain.trackers import MLflow
from polytrain.trackers.description import description_of
from polytrain.view.cli import main

KEY = "hunter-the-2nd"
OTHER = "another-hunter"

CASES: list[tuple[Any, Any]] = [
    ({"api_key": "K", "lr": 0.1}, {"api_key": "…", "lr": 0.1}),
    ({"wandb": {"key": "K"}}, {"wandb": {"key": "…"}}),
    ([{"token": "K"}, {"pad_token": "<pad>"}], [{"token": "…"}, {"pad_token": "<pad>"}]),
    ({"password": 1234}, {"password": "…"}),
    ({"secrets": ["K"], "auth": {"user": "K"}}, {"secrets": "…", "auth": "…"}),
    ({"use_auth_token": True, "token": None}, {"use_auth_token": True, "token": None}),
    ({"password": ""}, {"password": ""}),
    (["--wandb-key", "K", "--lr", "0.1"], ["--wandb-key", "…", "--lr", "0.1"]),
    (["--wandb-key=K", "--max-tokens=3"], ["--wandb-key=…", "--max-tokens=3"]),
    (["-api_key", "-K", "data/"], ["-api_key", "…", "…"]),
    (["--api-keys", "K", "K", "--lr", "1"], ["--api-keys", "…", "…", "--lr", "1"]),
    (["--token", "--lr", "1"], ["--token", "--lr", "1"]),
    (("--eos-token", "</s>"), ("--eos-token", "</s>")),
    (["trainer.api_key=K", "+hub.token=K", "lr=1"], ["trainer.api_key=…", "+hub.token=…", "lr=1"]),
    (["--db=postgres://me:K@host/db"], ["--db=postgres://…@host/db"]),
    ({"db": "postgres://me:K@host:5432/db"}, {"db": "postgres://…@host:5432/db"}),
    ({"data": "abfs://c@a/x?sv=1&sig=K"}, {"data": "abfs://c@a/x?sv=1&sig=…"}),
    ({"data": "s3://bucket/key=1", "n": 0.5}, {"data": "s3://bucket/key=1", "n": 0.5}),
    ({"env_vars": {"HF_TOKEN": "K", "A": "4"}}, {"env_vars": {"HF_TOKEN": "…", "A": "4"}}),
]


@pytest.mark.parametrize(("value", "wanted"), CASES)
def test_secrets_are_an_ellipsis_where_values_are_shown(value: Any, wanted: Any) -> None:
    assert shown(value) == wanted


@pytest.mark.parametrize(("value", "wanted"), CASES)
def test_digests_of_secrets_are_an_ellipsis_too(value: Any, wanted: Any) -> None:
    stored = without_secrets(value, digests("salt"))
    assert "K'" not in repr(stored)
    assert shown(stored) == wanted


def test_a_digest_is_the_same_for_the_same_secret_and_salt_alone() -> None:
    of = digests("salt")
    assert of("a") == of("a")
    assert len({of("a"), of("b"), digests("pepper")("a")}) == 3


def test_every_run_has_a_salt_of_its_own_which_it_keeps() -> None:
    assert salt_of({"salt": "kept"}) == "kept"
    assert salt_of({}) != salt_of({"salt": 3})


SEEN: list[Any] = []


def note(config: Mapping[str, Any]) -> None:
    SEEN.append(config)
    polytrain.report({"loss": 1.0})


def trainer(storage: Path, **config: Any) -> polytrain.Trainer:
    return make_trainer(
        "reference",
        note,
        train_loop_config={"lr": 0.1, **config},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=storage, progress=False),
    )


def everything_in(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


def test_a_function_gets_secrets_and_no_file_or_page_of_the_run_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"wandb": {"api_key": KEY}, "db": f"postgres://me:{KEY}@host/db"}
    args = ["--hub-token", KEY]
    result = trainer(tmp_path / "a", **config, args=args).fit()
    assert SEEN.pop() == {"lr": 0.1, **config, "args": args}
    trainer(tmp_path / "b", wandb={"api_key": OTHER}).fit()
    monkeypatch.chdir(tmp_path)
    run, other = result.path, str(tmp_path / "b" / "run")
    commands = [["show", run], ["report", run], ["diff", run, other]]
    commands.append(["diff", run, other, "-o", "diff.html"])
    for command in [*commands, *([*each, "--json"] for each in commands)]:
        assert main(command) == 0
    said = "".join(capsys.readouterr())
    assert "postgres://…@host/db" in said
    for written in (everything_in(tmp_path), said.encode()):
        assert KEY.encode() not in written
    assert b"pbkdf2:" not in (tmp_path / "run.html").read_bytes() + said.encode()


def test_a_changed_secret_is_reported_and_not_shown(tmp_path: Path) -> None:
    trainer(tmp_path, api_key=KEY).fit()
    assert trainer(tmp_path, api_key=KEY).fit().finished, "the same secret is the same run"
    with pytest.raises(InvalidJobError) as caught:
        trainer(tmp_path, api_key=OTHER).fit()
    text = str(caught.value)
    assert "{'api_key': '…'}" in text
    assert "is a secret by its name" in text
    assert not any(each in text for each in (KEY, OTHER, "pbkdf2:"))


def test_trackers_get_an_ellipsis() -> None:
    given = {"args": ["--wandb-key", KEY], "rounds": 3}
    # Whoever can write to a run's storage may have written it.
    stored = Configuration(hyperparameters={**given, "db": {"password": f"pbkdf2:{KEY}"}})
    facts = RunFacts()
    facts.take(Opened(anew=True, identity={}, world_size=2, configuration=stored))
    parameters = description_of(facts).parameters
    assert (parameters["args"], parameters["rounds"]) == (["--wandb-key", "…"], 3)
    assert KEY not in repr(parameters)


def test_settings_hold_no_secret() -> None:
    def validate(checkpoint: Any, **options: Any) -> Mapping[str, Any]:
        return {}

    config = ValidationConfig(
        fn=validate, task_config=ValidationTaskConfig(fn_kwargs={"api_key": KEY, "rows": 3})
    )
    run = RunConfig(worker_runtime_env={"env_vars": {"WANDB_API_KEY": KEY}})
    options = options_of(ScalingConfig(), run, config)
    assert KEY not in repr(options)
    assert options["validation_config.task_config.fn_kwargs"] == {"api_key": "…", "rows": 3}


def test_a_secret_for_one_validation_is_refused() -> None:
    wanted = ValidationTaskConfig(fn_kwargs={"api_key": KEY})
    with pytest.raises(ValueError, match="'api_key' is a secret by its name") as caught:
        validation_of_report(wanted, has_checkpoint=True, validates=True)
    assert KEY not in str(caught.value)


def lose_the_database() -> None:
    try:
        raise OSError(f"no answer from postgres://me:{KEY}@host/db")
    except OSError as error:
        raise RuntimeError(f"https://host/table?sig={KEY} can't be read") from error


def test_messages_repeat_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = MLflow(f"http://me:{KEY}@host")
    assert repr(tracker).startswith("MLflow(uri='http://…@host', experiment=None")
    (problem,) = runtime_env_problems({"env_vars": {"HF_TOKEN": KEY.encode()}}, is_inline=False)
    assert KEY not in str(problem)
    for given in (
        {"datasets": {"train": f"nowhere://me:{KEY}@host/x.csv"}},
        {"restore_from": f"s3://me:{KEY}@bucket/checkpoint"},
    ):
        with pytest.raises(InvalidJobError, match=r"://…@") as caught:
            make_trainer("reference", note, **given).fit()
        assert KEY not in str(caught.value)
    storage = RunConfig(name="run", storage_path=tmp_path, progress=False)
    inline = ScalingConfig(num_workers=0)
    lost = make_trainer("reference", lose_the_database, scaling_config=inline, run_config=storage)
    with pytest.raises(TrainingFailedError, match=r"table\?sig=… can't be read") as failed:
        lost.fit()
    assert "postgres://…@host/db" in failed.value.failures[0].traceback
    assert KEY.encode() not in everything_in(tmp_path) + str(failed.value).encode()
    for place in (f"s3://me:{KEY}@bucket/run", f"https://me:{KEY}@host/run"):
        assert main(["show", place]) == 1
    assert main(["run", "json:dumps", f"--hf-token={KEY}"]) == 2
    assert main(["run", "job.toml", "--set", f"a.api_key={KEY}"]) == 2
    assert KEY not in "".join(capsys.readouterr())


def test_a_page_is_as_private_as_the_umask_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(tmp_path).fit().path
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o077)
    try:
        assert main(["report", run]) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run.html").stat().st_mode) == 0o600
