"""The forge's workflows: nothing that others may change or steal decides what is released."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

WORKFLOWS = sorted((Path(__file__).parents[2] / ".github/workflows").glob("*.yml"))

SHA = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")


def workflow(path: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load(path.read_text())
    return found


def triggers(path: Path) -> dict[str, Any]:
    # YAML 1.1 takes `on` for true.
    found: dict[str, Any] = workflow(path)[True]
    return found


def test_there_is_one_for_each_kind_of_versions_and_one_for_releases() -> None:
    assert [path.stem for path in WORKFLOWS] == ["lowest", "newest", "release", "test"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_their_commits(path: Path) -> None:
    used = re.findall(r"uses: (.*)", path.read_text())
    assert [each for each in used if not SHA.fullmatch(each)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_job_has_the_permissions_that_it_names_and_no_secret(path: Path) -> None:
    assert workflow(path)["permissions"] == {}
    assert all("permissions" in job for job in workflow(path)["jobs"].values())
    assert "secrets" not in path.read_text()
    assert "pull_request_target" not in triggers(path)


def test_only_what_a_reviewer_approves_of_is_published() -> None:
    [release] = [path for path in WORKFLOWS if path.stem == "release"]
    jobs = workflow(release)["jobs"]
    publishing = [
        name for name, job in jobs.items() if "pypi-publish" in yaml.safe_dump(job["steps"])
    ]
    assert publishing == ["publish"]
    assert jobs["publish"]["environment"]["name"] == "pypi"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    # What builds runs other people's code, so it may sign nothing.
    assert jobs["build"]["permissions"] == {"contents": "read"}
    assert [*triggers(release)["push"]] == ["tags"]
