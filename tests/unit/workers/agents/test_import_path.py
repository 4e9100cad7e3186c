"""Where worker processes look for modules: as the driver does, and as their node's job wants."""

from __future__ import annotations

from polytrain.workers.agents.agent_spec import import_path

DRIVER = ("/home/me/project", "/usr/lib/python3.11", "/venv/site-packages")
RAYS = ("/venv/site-packages/ray/thirdparty_files", "/venv/site-packages/ray/_private/workers")


def test_without_a_runtime_environment_it_is_the_drivers() -> None:
    here = (*RAYS, "", *DRIVER[1:])
    assert import_path(DRIVER, here=here, variable="", is_same_environment=True) == DRIVER


def test_modules_of_the_job_come_first() -> None:
    variable = "/ray/py_modules/one:/ray/working_dir/two"
    here = (*RAYS, *variable.split(":"), *DRIVER[1:])
    path = import_path(DRIVER, here=here, variable=variable, is_same_environment=True)
    assert path == ("/ray/py_modules/one", "/ray/working_dir/two", *DRIVER)


def test_what_the_driver_has_from_the_same_variable_keeps_its_place() -> None:
    path = import_path(
        DRIVER, here=DRIVER, variable="/venv/site-packages:/other", is_same_environment=True
    )
    assert path == ("/other", *DRIVER)


def test_packages_of_the_jobs_own_environment_come_before_the_drivers() -> None:
    here = (*RAYS, "/usr/lib/python3.11", "/job/site-packages")
    path = import_path(DRIVER, here=here, variable="/job/dir", is_same_environment=False)
    assert path == (
        "/job/dir",
        "/usr/lib/python3.11",
        "/job/site-packages",
        "/home/me/project",
        "/venv/site-packages",
    )
