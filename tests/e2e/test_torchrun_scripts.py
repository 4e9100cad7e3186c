"""Scripts of torchrun: the same environment as under torchrun, exit codes, and restarts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polytrain import (
    FailureConfig,
    InvalidJobError,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    make_trainer,
)

# Written as for torchrun, without a thought of polytrain.
SHOWS_ITSELF = """
import json, os, pickle, sys
import torch
import torch.distributed as dist
import beside


class Own:
    lr: float = 0.1


if __name__ == "__main__":
    directory, *others = sys.argv[1:]
    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    variables = {name: os.environ.get(name) for name in os.environ}
    seen = {
        "argv": sys.argv,
        "file": __file__,
        "path": sys.path[0],
        "beside": beside.VALUE,
        "total": total.item(),
        "launched": dist.is_torchelastic_launched(),
        "pickles": isinstance(pickle.loads(pickle.dumps(Own())), Own),
        # Parsers of arguments convert by these.
        "annotations": str(Own.__annotations__),
        "variables": variables,
    }
    with open(f"{directory}/{dist.get_rank()}.json", "w") as file:
        json.dump(seen, file)
    dist.destroy_process_group()
    sys.exit(0)
"""

OF_ITS_OWN = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
"""Variables whose values are those of one launch."""


def trainer(quiet: RunConfig, script: Path | None = None, *args: str, **options: Any) -> Any:
    failures = FailureConfig(max_failures=options.pop("max_failures", 0))
    if script is not None:
        options["script"] = script
    return make_trainer(
        "torch",
        args=args,
        scaling_config=ScalingConfig(num_workers=options.pop("workers", 2)),
        run_config=replace(quiet, failure_config=failures),
        **options,
    )


def script_in(directory: Path, text: str) -> Path:
    script = directory / "train.py"
    script.write_text(text)
    (directory / "beside.py").write_text("VALUE = 7")
    return script


def seen(directory: Path) -> list[dict[str, Any]]:
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


def of_torchrun(rank: dict[str, Any]) -> dict[str, str]:
    """Which of a rank's variables torchrun documents."""
    return {
        name: value
        for name, value in rank["variables"].items()
        if name in ("RANK", "WORLD_SIZE")
        or name.startswith(("LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL"))
    }


def test_a_script_sees_what_it_sees_under_torchrun(quiet: RunConfig, tmp_path: Path) -> None:
    script = script_in(tmp_path, SHOWS_ITSELF)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    assert trainer(quiet, script, str(ours), "--lr", "0.1").fit().finished
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
            *(str(script), str(theirs), "--lr", "0.1"),
        ],
        check=True,
        capture_output=True,
        cwd=tmp_path,
    )
    for mine, other in zip(seen(ours), seen(theirs), strict=True):
        assert mine["argv"] == [str(script), str(ours), "--lr", "0.1"]
        for name in ("file", "path", "beside", "total", "launched", "pickles", "annotations"):
            assert mine[name] == other[name], name
        variables, expected = of_torchrun(mine), of_torchrun(other)
        # Which signals torchrun's agent handles is no matter of the script's.
        del expected["TORCHELASTIC_SIGNALS_TO_HANDLE"]
        assert variables.keys() == expected.keys()
        assert {k: v for k, v in variables.items() if k not in OF_ITS_OWN} == {
            k: v for k, v in expected.items() if k not in OF_ITS_OWN
        }


RESTARTS = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
assert os.environ["TORCHELASTIC_MAX_RESTARTS"] == "3"
if restarts == 0 and dist.get_rank() == 1:
    raise ValueError("the same error twice")
if restarts == 1 and dist.get_rank() == 1:
    raise ValueError("the same error twice")
if restarts == 2:
    sys.exit(3)
total = torch.ones(())
dist.all_reduce(total)
dist.destroy_process_group()
# A second group in one process.
dist.init_process_group("gloo")
dist.all_reduce(total)
if dist.get_rank() == 0:
    import polytrain

    polytrain.report({"total": total, "attempt": polytrain.get_context().get_attempt()})
    sys.exit()
"""


def test_a_script_is_restarted_after_every_failure(
    quiet: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training function wouldn't be, after the same error twice at the same step."""
    monkeypatch.setattr("polytrain.policy.failure._PAUSE_S", 0.001)
    result = trainer(quiet, script_in(tmp_path, RESTARTS), max_failures=3).fit()
    assert result.restarts == 3
    assert result.metrics == {"total": 4.0, "attempt": 3}


@pytest.fixture
def inline(quiet: RunConfig, tmp_path: Path) -> Any:
    """Run a text as a script in this process."""

    def run(text: str, *args: str, **options: Any) -> Result:
        script = script_in(tmp_path, text)
        result: Result = trainer(quiet, script, *args, workers=0, **options).fit()
        return result

    return run


@pytest.mark.parametrize("ends", ["sys.exit()", "sys.exit(0)", "raise SystemExit", "pass"])
def test_good_end(inline: Any, ends: str) -> None:
    assert inline(f"import sys\n{ends}").finished


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ("sys.exit(4)", "train.py exited with the code 4"),
        ("sys.exit('no data')", "train.py exited: no data"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_bad_end(inline: Any, ends: str, words: str) -> None:
    with pytest.raises(TrainingFailedError, match=words):
        inline(f"import sys\n{ends}")


def test_nothing_of_a_script_is_left_in_this_process(inline: Any) -> None:
    main, argv, path = sys.modules["__main__"], sys.argv, [*sys.path]
    variables = "import os; assert 'TORCHELASTIC_RUN_ID' in os.environ"
    inline(f"{variables}; import sys; sys.path.append('more')", "one")
    assert sys.modules["__main__"] is main
    assert sys.argv is argv
    assert sys.path == path
    assert "TORCHELASTIC_RUN_ID" not in os.environ


def test_module_as_with_python_m(
    quiet: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "trains"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "parts.py").write_text("VALUE = 8")
    (package / "main.py").write_text(
        "import sys, polytrain\nfrom .parts import VALUE\n"
        "polytrain.report({'name': __name__, 'value': VALUE, 'more': sys.argv[1:],\n"
        "    'first': sys.path[0], 'file': sys.argv[0]})"
    )
    monkeypatch.chdir(tmp_path)
    result = trainer(quiet, None, "--x", module="trains.main", workers=0).fit()
    assert result.metrics == {
        "name": "__main__",
        "value": 8,
        "more": ["--x"],
        "first": str(tmp_path),
        "file": str(package / "main.py"),
    }


def test_script_that_changes_during_the_run(inline: Any, tmp_path: Path) -> None:
    """Every attempt runs what the driver has read."""
    text = """
import os
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
open(__file__, "w").write("raise RuntimeError('another text')")
if restarts == 0:
    raise ValueError("once")
"""
    assert inline(text, max_failures=1).restarts == 1


def test_a_finished_run_of_other_arguments_is_no_result(quiet: RunConfig, tmp_path: Path) -> None:
    script = script_in(tmp_path, "pass")
    named = replace(quiet, name="run")
    trainer(named, script, "--epochs", "2", workers=0).fit()
    with pytest.raises(InvalidJobError, match="args"):
        trainer(named, script, "--epochs", "3", workers=0).fit()
    script.write_text("1 + 1")
    with pytest.raises(InvalidJobError, match="train_loop_per_worker"):
        trainer(named, script, "--epochs", "2", workers=0).fit()
