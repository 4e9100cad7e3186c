"""What a backend's author gets wrong in a method: the error names the method and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polytrain_plugins import (
    Backend,
    Capabilities,
    CheckpointKind,
    DatasetInfo,
    Demand,
    Device,
    Engine,
    Job,
    Member,
    Offer,
    Problem,
    World,
    options_beside_function,
)
from polytrain_plugins import returned as checks

NOTHING: Any = None

ME = Member(
    rank=0,
    world_size=2,
    local_rank=0,
    local_world_size=2,
    node_rank=0,
    node_count=1,
    host="h",
    cpus=1,
    gpus=0,
)
WORLD = World(attempt=0, me=ME, members=(ME, ME), offers=(Offer(), Offer()))
JOB = Job(num_workers=2, use_gpu=False, cpus_per_worker=1, has_training_function=False, datasets={})


class MyEngine(Engine[Any]):
    """Nothing is wrong."""

    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        yield

    def sum_over_ranks(self, values: Any, world: World) -> list[int]:
        return [2 * value for value in values]

    def save(self, model: Any, directory: Path) -> None: ...

    def load(self, directory: Path) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Mine(Backend):
    """Nothing is wrong."""

    name = "mine"
    contract_version = 1
    capabilities = Capabilities()

    def engine(self) -> Engine[Any]:
        return MyEngine()


def with_method(cls: type, method: str, result: Any) -> Any:
    """An object one of whose methods returns this."""
    return type(cls.__name__, (cls,), {method: lambda *_, **__: result})()


def generated(*values: Any) -> Iterator[Any]:
    """A generator that isn't a context manager."""
    yield from values


@contextmanager
def yielded(value: Any) -> Iterator[Any]:
    """A context manager."""
    yield value


@pytest.mark.parametrize(
    ("method", "result", "message"),
    [
        ("problems", None, "Mine.problems returned None. Return a list of Problem, or yield each."),
        ("problems", ["x"], "Mine.problems returned a str. Return a list of Problem"),
        (
            "problems",
            Problem(field="x", what="bad", remedy="good"),
            "Mine.problems returned a Problem. Return a list of Problem",
        ),
        ("demand", None, "Mine.demand returned None. Return a Demand."),
        (
            "prediction_problems",
            None,
            "Mine.prediction_problems returned None. Return a list of Problem, or yield each.",
        ),
        ("engine", Mine, "Mine.engine returned the class Mine. Return an Engine."),
    ],
)
def test_of_the_driver_half(method: str, result: Any, message: str) -> None:
    backend = with_method(Mine, method, result)
    calls = {
        "problems": lambda: checks.problems_of(backend, JOB),
        "demand": lambda: checks.demand_of(backend, JOB),
        "prediction_problems": lambda: checks.prediction_problems_of(
            backend, {}, DatasetInfo(name="data")
        ),
        "engine": lambda: checks.engine_of(backend),
    }
    with pytest.raises(TypeError) as caught:
        calls[method]()
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("method", "result", "message"),
    [
        ("offering", generated(), "MyEngine.offering returned a generator. Put @contextmanager"),
        (
            "offering",
            yielded(None),
            "MyEngine.offering yields None. Yield an Offer: Offer()",
        ),
        ("joined", None, "MyEngine.joined returned None. Put @contextmanager before the method"),
        ("sum_over_ranks", None, "MyEngine.sum_over_ranks returned None. Return a list of 2 whole"),
        ("sum_over_ranks", [2], "MyEngine.sum_over_ranks returned a list of 1. Return a list of 2"),
        ("sum_over_ranks", [2.0, 4.0], "MyEngine.sum_over_ranks returned a list with a float. R"),
        ("gather_over_ranks", None, "MyEngine.gather_over_ranks returned None. Return a list with"),
        ("gather_over_ranks", [b""], "MyEngine.gather_over_ranks returned a list of 1. Return"),
        ("gather_over_ranks", [b"", ""], "MyEngine.gather_over_ranks, in its list, returned a str"),
        ("train", None, "MyEngine.train returned None. Return the model"),
        ("train", generated(), "MyEngine.train returned a generator. Return the model"),
        ("predictor", None, "MyEngine.predictor returned None. Return a function that predicts"),
        ("digests", ["x"], "MyEngine.digests returned a list. Return a dict of names to digests"),
        ("digests", {"x": 1}, "MyEngine.digests, in its dict, returned an int. Return a dict"),
        ("model_columns", "x", "MyEngine.model_columns returned a str. Return a list of names"),
    ],
)
def test_of_the_engine(method: str, result: Any, message: str) -> None:
    engine = with_method(MyEngine, method, result)
    with ExitStack() as stack:
        calls = {
            "offering": lambda: checks.offered(stack, engine, ME),
            "joined": lambda: checks.join(stack, engine, WORLD),
            "sum_over_ranks": lambda: checks.summed(engine, [1, 2], WORLD),
            "gather_over_ranks": lambda: checks.gathered(engine, b"", WORLD, call=""),
            "train": lambda: checks.expect_model(engine, engine.train({}, NOTHING)),
            "predictor": lambda: checks.predictor_of(engine, Path(), {}),
            "digests": lambda: checks.digests_of(engine, None),
            "model_columns": lambda: checks.columns_of(engine, Path(), (), {}),
        }
        with pytest.raises(TypeError) as caught:
            calls[method]()
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("steps", [2.0, "2", -1, True, 1 << 63])
def test_steps_that_no_journal_could_hold_are_refused(steps: Any) -> None:
    with pytest.raises(TypeError) as caught:
        checks.total_steps_of(type("Mine", (Mine,), {"total_steps": steps})())
    assert str(caught.value).startswith(f"Mine.total_steps returned {steps!r}. Return a whole numb")


def test_steps_may_be_unknown_or_a_number_of_any_library() -> None:
    assert checks.total_steps_of(Mine()) is None
    counted = checks.total_steps_of(type("Mine", (Mine,), {"total_steps": np.int64(2)})())
    assert (counted, type(counted)) == (2, int)


class SavesLater(MyEngine):
    async def save(self, model: Any, directory: Path) -> None:  # type: ignore[override]  # the mistake
        (directory / "model").write_text(str(model))


@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_save_that_has_written_nothing_is_named(tmp_path: Path) -> None:
    SavesLater().save(1, tmp_path)  # type: ignore[unused-coroutine]  # the mistake
    with pytest.raises(TypeError, match=r"SavesLater.save has written no file. Write the model"):
        checks.expect_saved(SavesLater(), tmp_path)
    (tmp_path / "model").write_text("1")
    checks.expect_saved(SavesLater(), tmp_path)


class EndsEarly(MyEngine):
    @contextmanager
    def offering(self, me: Member) -> Iterator[Offer]:
        if me.world_size < 2:
            yield Offer()

    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        if world.size > 1:
            raise RuntimeError("no network")
        yield


def test_a_path_without_a_yield_is_named_and_other_errors_stay() -> None:
    with ExitStack() as stack:
        with pytest.raises(TypeError, match=r"EndsEarly.offering has returned before it yielded"):
            checks.offered(stack, EndsEarly(), ME)
        with pytest.raises(RuntimeError, match="no network"):
            checks.join(stack, EndsEarly(), WORLD)


def test_what_is_right_is_returned() -> None:
    engine = checks.engine_of(Mine())
    assert checks.problems_of(with_method(Mine, "problems", generated()), JOB) == []
    assert checks.demand_of(Mine(), JOB) == Demand()
    with ExitStack() as stack:
        assert checks.offered(stack, engine, ME) == Offer()
        checks.join(stack, engine, WORLD)
    summing = with_method(MyEngine, "sum_over_ranks", np.array([2, 4]))
    assert checks.summed(summing, [1, 2], WORLD) == [2, 4]
    assert checks.digests_of(engine, None) == {}
    assert checks.columns_of(engine, Path(), (), {}) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preload": "numpy"}, "Demand(preload='numpy'): give a tuple of names"),
        ({"preload": (1,)}, "Demand(preload=(1,)): give a tuple of names"),
        ({"whole_datasets": "val"}, "Demand(whole_datasets='val'): give a frozenset of names"),
        ({"environment": {"OMP_NUM_THREADS": 1}}, "Demand(environment={'OMP_NUM_THREADS': 1})"),
        ({"complete": {"label": None}}, "Demand(complete={'label': None}): give a str"),
        ({"leader_ports": "1"}, "Demand(leader_ports='1'): give a number, 0 or more"),
        ({"ports": -1}, "Demand(ports=-1): give a number, 0 or more"),
    ],
)
def test_a_demand_that_cannot_be_met_is_refused_where_it_is_made(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError) as caught:
        Demand(**arguments)
    assert str(caught.value).startswith(message)


def test_a_demand_takes_its_names_from_anything_that_has_them() -> None:
    names: Any = (name for name in ("a", "b"))
    assert Demand(preload=names, whole_datasets={"valid"}) == Demand(  # type: ignore[arg-type]  # a set may be given
        preload=("a", "b"), whole_datasets=frozenset({"valid"})
    )


def test_names_of_capabilities_are_what_they_name() -> None:
    """Otherwise "every_rank" would be taken for rank 0 alone, and other ranks' files be lost."""
    named: Any = {"checkpoint": "every_rank", "devices": ["cpu", "gpu"]}
    given = Capabilities(**named)
    assert given.checkpoint is CheckpointKind.EVERY_RANK
    assert given.devices == {Device.CPU, Device.GPU}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"checkpoint": "sharded"}, "'sharded' is unknown. Give one of: CheckpointKind.ONE_RANK, "),
        ({"devices": "tpu"}, "'tpu' is unknown. Give one of: Device.CPU, Device.GPU"),
    ],
)
def test_an_unknown_capability_is_refused_where_it_is_declared(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError) as caught:
        Capabilities(**arguments)
    assert str(caught.value).startswith(f"Capabilities: {message}")


@dataclass(frozen=True, kw_only=True)
class Weighed(Mine):
    weights: Any = None


def test_an_option_that_holds_an_array_is_told_from_its_default() -> None:
    assert list(options_beside_function(Weighed(), ["weights"])) == []
    [problem] = options_beside_function(Weighed(weights=np.zeros(2)), ["weights"])
    assert problem.field == "weights"


def test_an_offer_that_cannot_be_sent_is_refused_where_it_is_made() -> None:
    Offer(host="h", port=1, details={"a": [1, (2.0, None)], "b": {"c": b"d"}})
    Offer(details={"a": bytearray(b"id"), "b": memoryview(b"id")})
    with pytest.raises(TypeError, match=r"Offer\.details\['a'\]\[0\] is an ndarray. Offer plain"):
        Offer(details={"a": [np.zeros(2)]})
    port: Any = np.int64(3)
    with pytest.raises(TypeError, match=r"Offer\.port is an int64"):
        Offer(port=port)
