"""`RunConfig.worker_runtime_env`: who sets up which part, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import dropwhile
from typing import Any

from polytrain.config.constraints import wrong_type
from polytrain.text.secret_names import HIDDEN, is_secret
from polytrain_plugins import Problem
from polytrain_plugins.close_names import did_you_mean

FIELD = "RunConfig.worker_runtime_env"

_VARIABLES = "env_vars"

_DIRECTORIES = ("working_dir", "py_modules")
"""Parts that Ray fetches from an address."""

_PYTHON = ("pip", "uv", "conda", "image_uri", "container")
"""Parts that choose the Python environment; Ray takes one of them."""

_TRACEBACK = "Traceback (most recent call last):"


def variables_of(runtime_env: Mapping[str, Any] | None) -> Mapping[str, str]:
    """Return the variables for worker processes, which are set on Ray and without it."""
    return dict((runtime_env or {}).get(_VARIABLES) or {})


def parts_of_ray(runtime_env: Any) -> tuple[str, ...]:
    """Return the names of the parts that only Ray sets up."""
    given = runtime_env if isinstance(runtime_env, Mapping) else {}
    return tuple(name for name, value in given.items() if value and name != _VARIABLES)


def named(runtime_env: Mapping[str, Any]) -> str:
    """Return the argument and those of its parts that Ray sets up, for a sentence."""
    return f"{FIELD} ({', '.join(map(repr, parts_of_ray(runtime_env)))})"


def runtime_env_of_validations(
    workers: Mapping[str, Any] | None, own: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the runtime environment of tasks that validate: the workers', with parts of their own.

    Args:
        workers: `RunConfig.worker_runtime_env`.
        own: `ValidationConfig.ray_remote_kwargs["runtime_env"]`. A part of it replaces the workers'
            part, and one that chooses the Python environment replaces theirs, however they choose
            it. Variables of both are set.
    """
    workers, own = workers or {}, own or {}
    chooses_python = any(own.get(name) for name in _PYTHON)
    kept = {
        name: value for name, value in workers.items() if not (chooses_python and name in _PYTHON)
    }
    variables = {**variables_of(workers), **variables_of(own)}
    return {**kept, **own, **({_VARIABLES: variables} if variables else {})}


def runtime_env_problems(runtime_env: Mapping[str, Any], *, is_inline: bool) -> Iterator[Problem]:
    """Yield what is wrong with a runtime environment."""
    yield from _variable_problems(runtime_env.get(_VARIABLES))
    of_ray = parts_of_ray(runtime_env)
    if not of_ray:
        return
    if is_inline:
        yield Problem(
            field=FIELD,
            what=f"{', '.join(map(repr, of_ray))}: num_workers=0 trains in this process, whose "
            "environment is there already",
            remedy="Use num_workers=1, or install what is needed here",
        )
        return
    yield from _problems_of_ray(runtime_env)


def _variable_problems(variables: Any) -> Iterator[Problem]:
    field = f"{FIELD}[{_VARIABLES!r}]"
    if variables is None:
        return
    if not isinstance(variables, Mapping):
        yield wrong_type(field, variables, dict)
        return
    for name, value in variables.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            given = HIDDEN if is_secret(str(name)) else value
            yield Problem(
                field=field,
                what=f"{name!r} is {given!r}, and variables are strings",
                remedy=f"Write {str(name)!r}: {str(given)!r}",
            )
        elif not name or "=" in name or "\0" in name + value:
            yield Problem(
                field=field,
                what=f"no environment can hold the variable {name!r}",
                remedy="Leave '=' and NUL out of its name, and NUL out of its value",
            )


def _problems_of_ray(runtime_env: Mapping[str, Any]) -> Iterator[Problem]:
    # Ray takes a while to import. A run that needs these parts imports it anyway.
    from ray.runtime_env import RuntimeEnv

    known = sorted(name for name in RuntimeEnv.known_fields if not name.startswith("_"))
    for name in runtime_env:
        if name not in known and name not in ("nsight", "rocprof-sys"):
            yield Problem(
                field=FIELD,
                what=f"Ray has no {name!r} in a runtime environment",
                remedy=f"{did_you_mean(name, known)}It has: {', '.join(known)}",
            )
    local = [
        place
        for name in _DIRECTORIES
        for place in _listed(runtime_env.get(name))
        if not (isinstance(place, str) and "://" in place)
    ]
    for place in local:
        yield Problem(
            field=FIELD,
            what=f"{place!r} isn't an address, and Ray fetches the files of workers from one",
            remedy="Give an address such as s3://bucket/code.zip, or pass the directory to "
            "ray.init(runtime_env=…), which uploads it",
        )
    if local:
        return
    try:
        RuntimeEnv(**runtime_env)
    except (TypeError, ValueError) as error:
        yield Problem(
            field=FIELD, what=f"Ray refuses it: {error}", remedy="Give what Ray documents"
        )


def _listed(places: Any) -> list[Any]:
    if places is None:
        return []
    return list(places) if isinstance(places, list | tuple) else [places]


def cause_of(message: str) -> str:
    """Return why a runtime environment can't be set up, without the stack of Ray's own code.

    What follows the stack is kept whole: the exception, and the output of pip or conda.

    Args:
        message: Ray's, with the node and a traceback.
    """
    lines = message.strip().splitlines()
    starts = [number for number, line in enumerate(lines) if _starts_stack(line)]
    if not starts:
        return message.strip()
    after = iter(lines[starts[-1] + 1 :])
    cause = [*dropwhile(lambda line: line.startswith(" ") or not line, after)]
    # The first of several tracebacks names the node.
    node = lines[starts[0]].removesuffix(_TRACEBACK).strip()
    return "\n".join(cause) + (f"\n(on {node.strip('[]')})" if node else "")


def _starts_stack(line: str) -> bool:
    # The output of a command is indented, and may have tracebacks itself.
    return line.endswith(_TRACEBACK) and not line.startswith(" ")
