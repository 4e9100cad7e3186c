"""Checks what a backend's methods return: an error names the method, and says what to return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from polytrain_plugins.backend import Backend, Demand, Job
from polytrain_plugins.engine import Engine, Predictions
from polytrain_plugins.errors import Problem
from polytrain_plugins.shard import DatasetInfo
from polytrain_plugins.type_names import a_type, quoted
from polytrain_plugins.world import Member, Offer, World

if TYPE_CHECKING:
    import pyarrow as pa

Value = TypeVar("Value")

_MOST_STEPS = 1 << 62
"""More steps than any run has. The journal's numbers end here."""

_NEVER_YIELDED = "generator didn't yield"
"""What `contextlib` says of it, without the function's name."""


def name_of(owner: Backend | Engine[Any], method: str) -> str:
    """Return the name of a method, with its class."""
    return f"{type(owner).__name__}.{method}"


def problems_of(backend: Backend, job: Job) -> list[Problem]:
    """Return `Backend.problems`.

    Raises:
        TypeError: it returns something else than problems.
    """
    return _listed(backend.problems(job), name_of(backend, "problems"))


def prediction_problems_of(
    backend: Backend, options: Mapping[str, Any], data: DatasetInfo
) -> list[Problem]:
    """Return `Backend.prediction_problems`.

    Raises:
        TypeError: it returns something else than problems.
    """
    given = backend.prediction_problems(options, data)
    return _listed(given, name_of(backend, "prediction_problems"))


def _listed(given: Any, method: str) -> list[Problem]:
    wanted = "a list of Problem, or yield each"
    if isinstance(given, str) or not hasattr(given, "__iter__"):
        raise _wrong(method, a_type(given), wanted)
    return [_expected(each, Problem, method, wanted) for each in given]


def demand_of(backend: Backend, job: Job) -> Demand:
    """Return `Backend.demand`.

    Raises:
        TypeError: it returns something else.
    """
    return _expected(backend.demand(job), Demand, name_of(backend, "demand"), "a Demand")


def total_steps_of(backend: Backend) -> int | None:
    """Return `Backend.total_steps`.

    Raises:
        TypeError: it is something else than a number of steps.
    """
    steps: Any = backend.total_steps
    if steps is None:
        return None
    is_whole = not isinstance(steps, bool) and isinstance(steps, Integral)
    if not is_whole or not 0 <= steps <= _MOST_STEPS:
        # Anything else would make the run's journal unreadable.
        wanted = "a whole number from 0, by a property, or None if it is unknown"
        raise _wrong(name_of(backend, "total_steps"), quoted(steps), wanted)
    return int(steps)


def engine_of(backend: Backend) -> Engine[Any]:
    """Return a new engine.

    Raises:
        TypeError: `Backend.engine` returns something else.
    """
    method = name_of(backend, "engine")
    return _expected(backend.engine(), Engine, method, "an Engine")  # type: ignore[type-abstract]  # for isinstance


def offered(stack: ExitStack, engine: Engine[Any], me: Member) -> Offer:
    """Enter `Engine.offering`, and return the offer.

    Raises:
        TypeError: it isn't a context manager, or yields nothing or something else.
    """
    offer = _entered(stack, engine, "offering", engine.offering(me))
    if not isinstance(offer, Offer):
        method = name_of(engine, "offering")
        raise TypeError(f"{method} yields {a_type(offer)}. Yield an Offer: Offer() offers nothing.")
    return offer


def join(stack: ExitStack, engine: Engine[Any], world: World) -> None:
    """Enter `Engine.joined`.

    Raises:
        TypeError: it isn't a context manager, or doesn't yield.
    """
    _entered(stack, engine, "joined", engine.joined(world))


def summed(engine: Engine[Any], values: Sequence[int], world: World) -> list[int]:
    """Return `Engine.sum_over_ranks`.

    Raises:
        TypeError: it returns something else than as many whole numbers.
    """
    sums: Any = engine.sum_over_ranks(values, world)
    what = a_type(sums)
    if hasattr(sums, "__iter__") and hasattr(sums, "__len__"):
        others = [each for each in sums if not isinstance(each, Integral)]
        if len(sums) == len(values) and not others:
            return [int(each) for each in sums]
        what += f" with {a_type(others[0])}" if others else f" of {len(sums)}"
    wanted = f"a list of {len(values)} whole numbers, the sums of each over all ranks"
    raise _wrong(name_of(engine, "sum_over_ranks"), what, wanted)


def gathered(engine: Engine[Any], piece: bytes, world: World, *, call: str) -> list[bytes]:
    """Return `Engine.gather_over_ranks`.

    Raises:
        TypeError: it returns something else than each rank's bytes.
    """
    method = name_of(engine, "gather_over_ranks")
    wanted = f"a list with the bytes of each of {world.size} ranks"
    pieces = _expected(engine.gather_over_ranks(piece, world, call=call), list, method, wanted)
    if len(pieces) != world.size:
        raise _wrong(method, f"a list of {len(pieces)}", wanted)
    return [_expected(each, bytes, f"{method}, in its list,", wanted) for each in pieces]


def predictor_of(
    engine: Engine[Any], directory: Path, options: Mapping[str, Any]
) -> Callable[[pa.Table], Predictions]:
    """Return `Engine.predictor`.

    Raises:
        TypeError: it returns something else than a function.
    """
    given: Any = engine.predictor(directory, **options)
    if not callable(given):
        wanted = "a function that predicts a table"
        raise _wrong(name_of(engine, "predictor"), a_type(given), wanted)
    predict: Callable[[pa.Table], Predictions] = given
    return predict


def expect_model(engine: Engine[Any], model: Any) -> None:
    """Check what `Engine.train` has returned, where it is to be saved.

    Raises:
        TypeError: it is None, or what makes the model later.
    """
    if model is None or inspect.isgenerator(model) or inspect.iscoroutine(model):
        wanted = "the model, which the last checkpoint holds"
        raise _wrong(name_of(engine, "train"), a_type(model), wanted)


def expect_saved(engine: Engine[Any], directory: Path) -> None:
    """Check that `Engine.save` has written into this directory, the whole checkpoint's.

    Raises:
        TypeError: it hasn't.
    """
    if not any(directory.iterdir()):
        raise TypeError(
            f"{name_of(engine, 'save')} has written no file. Write the model into the directory "
            "that it gets, and don't make it async."
        )


def digests_of(engine: Engine[Any], model: Any) -> Mapping[str, str]:
    """Return `Engine.digests`.

    Raises:
        TypeError: it returns something else than digests by name.
    """
    method, wanted = name_of(engine, "digests"), "a dict of names to digests, both str"
    found: Any = engine.digests(model)
    by_name: Mapping[str, str] = _expected(found, Mapping, method, wanted)  # type: ignore[type-abstract]  # for isinstance
    for each in (*by_name, *by_name.values()):
        _expected(each, str, f"{method}, in its dict,", wanted)
    return by_name


def columns_of(
    engine: Engine[Any], directory: Path, columns: Sequence[str], options: Mapping[str, Any]
) -> Sequence[str] | None:
    """Return `Engine.model_columns`.

    Raises:
        TypeError: it returns something else than names, or None.
    """
    found = engine.model_columns(directory, columns, **options)
    if isinstance(found, str) or not isinstance(found, Sequence | None):
        wanted = "a list of names, or None for all"
        raise _wrong(name_of(engine, "model_columns"), a_type(found), wanted)
    return found


def _entered(stack: ExitStack, engine: Engine[Any], name: str, made: Any) -> Any:
    method = name_of(engine, name)
    if not hasattr(type(made), "__enter__"):
        raise TypeError(
            f"{method} returned {a_type(made)}. Put @contextmanager before the method, and yield "
            "once."
        )
    try:
        return stack.enter_context(made)
    except RuntimeError as error:
        if str(error) != _NEVER_YIELDED:
            raise
        raise TypeError(f"{method} has returned before it yielded. Yield on every path.") from error


def _expected(value: Any, kind: type[Value], method: str, wanted: str) -> Value:
    if not isinstance(value, kind):
        raise _wrong(method, a_type(value), wanted)
    return value


def _wrong(method: str, what: str, wanted: str) -> TypeError:
    return TypeError(f"{method} returned {what}. Return {wanted}.")
