"""`RunConfig(worker_runtime_env=…)`: checked before anything starts, and what workers get."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import polytrain as train

NAME = "POLYTRAIN_TEST_VARIABLE"


def variables() -> dict[str, Any]:
    return {"set": os.environ.get(NAME), "threads": os.environ["OMP_NUM_THREADS"]}


def reads_variables() -> dict[str, Any]:
    if train.get_context().get_world_rank() == 0:
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "model").write_text("any")
            checkpoint = train.Checkpoint.from_directory(directory)
            train.report({}, checkpoint=checkpoint, validation=True)
    else:
        train.report({})
    return variables()


def validates(checkpoint: train.Checkpoint) -> dict[str, Any]:
    return variables()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_and_validations_get_the_variables(
    tmp_path: Path, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Also one that the driver has, and one that polytrain sets by itself.
    monkeypatch.setenv(NAME, "the driver's")
    result = train.DataParallelTrainer(
        reads_variables,
        scaling_config=train.ScalingConfig(num_workers=num_workers),
        run_config=train.RunConfig(
            storage_path=tmp_path,
            progress=False,
            worker_runtime_env={"env_vars": {NAME: "the run's", "OMP_NUM_THREADS": "3"}},
        ),
        validation_config=train.ValidationConfig(validates),
    ).fit()
    expected = {"set": "the run's", "threads": "3"}
    assert result.return_values == (expected,) * max(1, num_workers)
    assert result.metrics == expected
    assert os.environ[NAME] == "the driver's"


MODULE = "import os\nNAME = os.environ.get('POLYTRAIN_TEST_VARIABLE')\n"

IMPORTED_EARLY = """
import polytrain as train
from polytrain.backends.reference import Reference, ReferenceEngine
from polytrain_plugins import Demand

class Early(Reference):
    def demand(self, job):
        return Demand(preload=("reads_early",))

def function():
    import reads_early
    return reads_early.NAME

def fit(value):
    return train.Trainer(
        Early(), function, scaling_config=train.ScalingConfig(num_workers=1),
        run_config=train.RunConfig(
            storage_path="runs", progress=False,
            worker_runtime_env={"env_vars": {"POLYTRAIN_TEST_VARIABLE": value}} if value else None,
        ),
    ).fit().return_value

print("RETURNED", fit("one"), fit("two"), fit(None))
"""


def test_variables_are_set_before_modules_are_imported(tmp_path: Path) -> None:
    (tmp_path / "reads_early.py").write_text(MODULE)
    (tmp_path / "script.py").write_text(IMPORTED_EARLY)
    environment = {**os.environ, NAME: "driver"}
    run = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    # Runs of one process share what is imported, but not with other variables.
    assert "RETURNED one two driver" in run.stdout, run.stderr


OF_THE_JOB = """
import os, tempfile, time
import ray
import polytrain as train
from polytrain.backends.reference import Reference
from polytrain_plugins import Demand

class Early(Reference):
    def demand(self, job):
        return Demand(preload=("reads_early",))

def function():
    import reads_early
    return reads_early.NAME, time.tzname[0], tempfile.gettempdir()

variables = {
    "POLYTRAIN_TEST_VARIABLE": "${PLACE}/job", "TZ": "JST-9", "TMPDIR": os.path.abspath("own")
}
ray.init(
    address="local", num_cpus=1, log_to_driver=False, logging_level=40,
    runtime_env={"env_vars": variables},
)
print("RETURNED", train.Trainer(
    Early(), function, scaling_config=train.ScalingConfig(num_workers=1),
    run_config=train.RunConfig(storage_path="runs", progress=False),
).fit().return_value)
ray.shutdown()
"""


def test_variables_of_the_ray_job_are_set_before_modules_are_imported(tmp_path: Path) -> None:
    """The driver's process doesn't get them, and what workers are forked from has to."""
    (tmp_path / "own").mkdir()
    (tmp_path / "reads_early.py").write_text(f"{MODULE}import tempfile\ntempfile.gettempdir()\n")
    (tmp_path / "script.py").write_text(OF_THE_JOB)
    run = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PLACE": "/here"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = ("/here/job", "JST", str(tmp_path / "own"))
    assert f"RETURNED {found}" in run.stdout, run.stdout + run.stderr


BAD: list[tuple[Any, int, str]] = [
    (["pip"], 2, "worker_runtime_env: it is a list"),
    ({"env_vars": ["A=1"]}, 2, r"\['env_vars'\]: it is a list"),
    ({"env_vars": {"A": 1}}, 2, r"'A' is 1, and variables are strings.*Write 'A': '1'"),
    ({"env_vars": {"A=B": "1"}}, 0, "no environment can hold the variable 'A=B'"),
    ({"pip": ["numpy"]}, 0, "'pip': num_workers=0 trains in this process"),
    ({"env_var": {"A": "1"}}, 2, "Ray has no 'env_var'.*Did you mean 'env_vars'"),
    ({"pip": 3}, 2, r"Ray refuses it: runtime_env\['pip'\] must be"),
    ({"pip": ["a"], "conda": "b"}, 2, "Ray refuses it: .*cannot be specified at the same time"),
    ({"working_dir": "/tmp"}, 2, r"'/tmp' isn't an address.*ray\.init\(runtime_env=…\)"),
    ({"py_modules": [os]}, 2, "isn't an address"),
]


@pytest.mark.parametrize(("given", "num_workers", "what"), BAD, ids=[what for *_, what in BAD])
def test_what_no_worker_can_get_is_refused(given: Any, num_workers: int, what: str) -> None:
    with pytest.raises(train.InvalidJobError, match=f"(?s){what}"):
        train.DataParallelTrainer(
            reads_variables,
            scaling_config=train.ScalingConfig(num_workers=num_workers),
            run_config=train.RunConfig(worker_runtime_env=given),
        )


def test_what_only_ray_sets_up_is_refused_without_ray() -> None:
    with pytest.raises(train.InvalidJobError, match="'pip': only Ray sets this up"):
        train.DataParallelTrainer(
            reads_variables,
            scaling_config=train.ScalingConfig(num_workers=1, cluster="local"),
            run_config=train.RunConfig(worker_runtime_env={"pip": ["numpy"]}),
        )


ON_RAY = """
import os
import sys
import tempfile
import ray
import polytrain as train

def found():
    import os
    from code_of_the_run import VALUE
    with open("data_of_the_run.txt") as file:
        return VALUE, file.read(), os.environ.get("POLYTRAIN_TEST_VARIABLE")

def function():
    with tempfile.TemporaryDirectory() as directory:
        open(directory + "/model", "w").close()
        checkpoint = train.Checkpoint.from_directory(directory)
        is_first = train.get_context().get_world_rank() == 0
        train.report({}, checkpoint=checkpoint if is_first else None, validation=is_first)
    return found()

def validate(checkpoint):
    return {"validation": found(), "own": os.environ.get("OWN")}

ray.init(
    address="local", num_cpus=2, log_to_driver=False, logging_level=40,
    runtime_env={"working_dir": sys.argv[2]},
)

def fit(runtime_env):
    own = {"num_cpus": 0, "runtime_env": {"env_vars": {"OWN": "of the validation"}}}
    return train.DataParallelTrainer(
        function, scaling_config=train.ScalingConfig(num_workers=2),
        validation_config=train.ValidationConfig(validate, ray_remote_kwargs=own),
        run_config=train.RunConfig(
            storage_path="runs", progress=False, worker_runtime_env=runtime_env,
            failure_config=train.FailureConfig(max_failures=5),
        ),
    ).fit()

variables = {"POLYTRAIN_TEST_VARIABLE": "set"}
if "sweep" in sys.argv:
    print("OF THE JOB", fit(None).return_values)
print("WITH VARIABLES", fit({"env_vars": variables}).return_values)
result = fit({"working_dir": sys.argv[1], "env_vars": variables})
print("RETURNED", result.return_values)
print("VALIDATED", result.metrics)
try:
    fit({"working_dir": sys.argv[1] + "x.zip"})
except train.TrainingFailedError as error:
    print("REPORTED", error.failures[0].kind, str(error).replace("\\n", " "))
    print("ATTEMPTS", len(error.failures))
ray.shutdown()
"""


@pytest.mark.sweep
def test_ray_sets_up_the_files_of_workers(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    is_sweep = request.config.getoption("--sweep")
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as archive:
        archive.writestr("code/code_of_the_run.py", "VALUE = 7\n")
        archive.writestr("code/data_of_the_run.txt", "rows")
    job = tmp_path / "job"
    job.mkdir()
    (job / "code_of_the_run.py").write_text("VALUE = 3\n")
    (job / "data_of_the_run.txt").write_text("the job's rows")
    (tmp_path / "script.py").write_text(ON_RAY)
    run = subprocess.run(
        [
            *(sys.executable, "script.py", f"file://{tmp_path / 'code.zip'}", str(job)),
            *(["sweep"] if is_sweep else []),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    # The job's working directory is the workers', unless the run has one of its own.
    if is_sweep:
        of_the_job = (3, "the job's rows", None)
        assert f"OF THE JOB {(of_the_job, of_the_job)}" in run.stdout, run.stdout + run.stderr
    with_variable = (3, "the job's rows", "set")
    assert f"WITH VARIABLES {(with_variable, with_variable)}" in run.stdout, run.stdout
    value = (7, "rows", "set")
    assert f"RETURNED {(value, value)}" in run.stdout, run.stdout + run.stderr
    # A validation has a variable of its own besides.
    validated = {"validation": list(value), "own": "of the validation"}
    assert f"VALIDATED {validated}" in run.stdout, run.stdout + run.stderr
    # The failure of the setup ends the run at once, in Ray's own words.
    [printed] = [line for line in run.stdout.splitlines() if line.startswith("REPORTED")]
    which = "RunConfig.worker_runtime_env ('working_dir')"
    assert printed.startswith(f"REPORTED startup {which} can't be set up: "), printed
    assert "x.zip" in printed
    # Once: neither a restart nor another worker repeats it.
    assert "ATTEMPTS 1" in run.stdout


NO_SUCH_PACKAGE = """
import ray
import polytrain as train

ray.init(address="local", num_cpus=2, log_to_driver=False, logging_level=40)
pip = {"packages": ["no-such-package==9"], "pip_install_options": ["--no-index"]}
try:
    train.DataParallelTrainer(
        lambda: None, scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(
            storage_path="runs", worker_runtime_env={"pip": pip},
            failure_config=train.FailureConfig(max_failures=5),
        ),
    ).fit()
except train.TrainingFailedError as error:
    print("REPORTED", error)
    print("ATTEMPTS", len(error.failures))
ray.shutdown()
"""


# In `make test`, `test_ray_sets_up_the_files_of_workers` has a setup that fails.
@pytest.mark.only_in_sweep
def test_a_package_that_pip_does_not_find_is_reported_with_the_argument(tmp_path: Path) -> None:
    """Ray copies the driver's virtual environment before it calls pip, so this one is small."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "small"], check=True)
    [packages] = (tmp_path / "small").glob("lib/python*/site-packages")
    [found] = [path for path in site.getsitepackages() if path.startswith(sys.prefix)]
    (packages / "these.pth").write_text(f"import site; site.addsitedir({found!r})")
    (tmp_path / "script.py").write_text(NO_SUCH_PACKAGE)
    run = subprocess.run(
        [tmp_path / "small/bin/python", "script.py"],
        cwd=tmp_path,
        # Ray itself tries again, in case an index was busy.
        env={**os.environ, "RUNTIME_ENV_RETRY_TIMES": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    printed = run.stdout.partition("REPORTED ")[2]
    assert printed.startswith("RunConfig.worker_runtime_env ('pip') can't be set up: "), run.stderr
    assert "ERROR: No matching distribution found for no-such-package==9" in printed
    # Once: neither a restart nor another worker repeats it.
    assert "ATTEMPTS 1" in printed
    assert run.stderr.count("No matching distribution") <= 1, run.stderr
