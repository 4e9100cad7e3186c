"""The contract tier: the two halves of a backend, in local processes, without Ray."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from polytrain.api.backend_checks import backend_problems, function_problems, missing_options
from polytrain.api.trainer import make_trainer
from polytrain.config.run_spec import RunSpec
from polytrain.testing.faults import Fault, Kind
from polytrain.testing.functions import STEPS, broadcast, count_steps, list_ports
from polytrain.testing.local_world import WorldRecord, run_world
from polytrain_plugins import (
    CONTRACT_VERSION,
    Backend,
    DatasetInfo,
    Device,
    Engine,
    Job,
    load_backend,
)

ROWS = 203
"""A prime number: no world size divides it."""

_ROUNDING = 1e-5
"""Relative and absolute difference between predictions that are equal but for rounding."""

_TRAINED = 1e-3
"""Difference between predictions after training whose sums were rounded differently."""

TrainingFunction = Callable[[Mapping[str, Any]], None]


def kit_table(*, outlier: int | None = None) -> pa.Table:
    """The kit's data set "train": three features, and a label of 0 or 1 that depends on them.

    Args:
        outlier: a row whose label is flipped.
    """
    generator = np.random.default_rng(7)
    features = generator.normal(size=(ROWS, 3))
    label = (features @ [1.0, -2.0, 0.5] + 0.1 * generator.normal(size=ROWS) > 0).astype(float)
    if outlier is not None:
        label[outlier] = 1 - label[outlier]
    columns = {f"x{i}": features[:, i] for i in range(3)}
    return pa.table({**columns, "label": label})


class ContractTier:
    """Tests of a backend's two halves without a run."""

    backend: Backend
    """The backend to test, with options for the kit's data where it is declarative."""

    training_function: TrainingFunction | None = None
    """For a backend that isn't declarative: takes one argument, trains a model on
    `get_dataset_shard("train")`, and has every rank report a checkpoint whose files are equal
    where the models are."""

    prediction_options: Mapping[str, Any] = MappingProxyType({})
    """For a backend that predicts with more than a checkpoint: options of `Result.predict`."""

    @pytest.fixture(scope="class")
    @classmethod
    def trained(cls, tmp_path_factory: pytest.TempPathFactory) -> WorldRecord:
        """Two ranks that have trained on the kit's data."""
        return cls._train(tmp_path_factory.mktemp("trained"), kit_table())

    @pytest.fixture(scope="class")
    @classmethod
    def listening(cls, tmp_path_factory: pytest.TempPathFactory) -> WorldRecord:
        """Two ranks that have reported the ports at which they listen, and left normally."""
        return cls._list_ports(tmp_path_factory.mktemp("listening"))

    def test_is_found_by_its_name(self) -> None:
        """`make_trainer(name)` finds this class, written for this contract.

        If this fails: the entry point in the group `polytrain.backends` is missing or has a
        different name; or the distribution isn't installed.
        """
        backend = type(self.backend)
        assert load_backend(backend.name) is backend
        assert backend.contract_version == CONTRACT_VERSION

    def test_is_a_value(self) -> None:
        """The driver half is a frozen dataclass that survives pickling; all options have defaults.

        If this fails: a field holds an open resource, has no default, which a training function
        needs, or is named as an argument of `make_trainer`; the class isn't a frozen dataclass; or
        `mutable_on_resume` names no option.
        """
        parameters = getattr(type(self.backend), "__dataclass_params__", None)
        assert parameters is not None, "not a dataclass"
        assert parameters.frozen
        without_default = [each.field for each in missing_options(type(self.backend), {})]
        assert not without_default, "give a default: a training function needs no options"
        options = {each.name for each in dataclasses.fields(self.backend)}  # type: ignore[arg-type]  # every backend is a dataclass
        assert {*self.backend.mutable_on_resume} <= options, "mutable_on_resume names no option"
        parameters_of_ours = inspect.signature(make_trainer).parameters.values()
        ours = {each.name for each in parameters_of_ours if each.kind is not each.VAR_KEYWORD}
        taken = options & {*ours, "name"}
        assert not taken, "make_trainer takes these arguments for itself: give other names"
        assert pickle.loads(pickle.dumps(self.backend)) == self.backend

    def test_driver_half_imports_no_framework(self) -> None:
        """Loading the backend, and asking it for problems and demand, imports no framework.

        If this fails: move an import from the top of the driver half's module, or of its package,
        into the engine's module.
        """
        script = (
            "import pickle, sys\n"
            f"backend = pickle.loads({pickle.dumps(self.backend)!r})\n"
            f"job = pickle.loads({pickle.dumps(_job(self.backend))!r})\n"
            "list(backend.problems(job)), backend.demand(job)\n"
            "print([name for name in backend.requires if name in sys.modules])"
        )
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert run.stdout.strip() == "[]", run.stderr

    def test_collective_spans_the_world(self, tmp_path: Path) -> None:
        """Every rank offers, joins, trains and leaves.

        If this fails: `joined` doesn't join the collective, or `sum_over_ranks` uses another one.
        """
        record = self._count_steps(tmp_path, world_size=3)
        assert [rank.failure for rank in record.ranks] == [None] * 3
        assert all(rank.done and rank.end == "exited with code 0" for rank in record.ranks)
        assert [len(rank.reports) for rank in record.ranks] == [STEPS] * 3

    def test_what_rank_0_sends_reaches_every_rank(self, tmp_path: Path) -> None:
        """`polytrain.collective` works in a training function.

        If this fails: `gather_over_ranks` changes or reorders bytes; or `sum_over_ranks`, which it
        uses by default, rounds large numbers, or works only right after `joined` was entered.
        """
        record = run_world(
            self.backend,
            data=kit_table(),
            path=tmp_path,
            world_size=3,
            training_function=broadcast,
        )
        assert [rank.failure for rank in record.ranks] == [None] * 3
        received = [report.metrics["received"] for rank in record.ranks for report in rank.reports]
        assert received == [[[0, 0], [1, 7], [100_000, 700_000]]] * 3

    def test_every_rank_ends_in_the_same_model(self, trained: WorldRecord) -> None:
        """All ranks have the same model, although each has seen only its part of the rows.

        If this fails: each rank trains its own model.
        """
        first, second = (list(trained.saved(rank).values()) for rank in (0, 1))
        assert first, "nothing was saved"
        assert first == second

    def test_every_row_is_in_the_model(self, trained: WorldRecord, tmp_path: Path) -> None:
        """Changing the very last row of any rank changes the model.

        If this fails: the training loop leaves out the last, incomplete batch.
        """
        for rank, last in enumerate((ROWS // 2 - 1, ROWS - 1)):
            changed = self._train(tmp_path / str(rank), kit_table(outlier=last))
            assert changed.saved(rank) != trained.saved(rank), (
                f"rank {rank} leaves out its last row"
            )

    def test_each_row_counts_alike(self, tmp_path: Path) -> None:
        """Ranks with two rows and one end, but for rounding, in the model of one rank with all.

        This is shown by predictions, if declared.

        If this fails: something is averaged over ranks as if they had equally many rows. Multiply
        by `Shard.gradient_weight`, or add up sums and numbers of rows.
        """
        if not self.backend.capabilities.predictive:
            return
        few, predictions = kit_table(outlier=2).slice(length=3), []
        for world_size in (1, 2):
            record = self._train(tmp_path / str(world_size), few, world_size=world_size)
            saved = self._checkpoint(record)
            assert saved is not None
            predictions += self._predicted(saved, kit_table())
        alone, together = predictions
        np.testing.assert_allclose(together, alone, rtol=_TRAINED, atol=_TRAINED)

    def test_saved_model_is_loaded_by_another_process(
        self, trained: WorldRecord, tmp_path: Path
    ) -> None:
        """An attempt of more ranks that starts from the last checkpoint has nothing left to train.

        If this fails: `save` doesn't write everything that `load` or `train` needs, or `train`
        ignores `session.checkpoint`; or one of them needs as many ranks as have saved.
        """
        if not self.backend.capabilities.declarative:
            self._assert_needs_function()
            return
        again = run_world(
            self.backend,
            data=kit_table(),
            path=tmp_path,
            world_size=3,
            checkpoint=self._checkpoint(trained),
        )
        assert [rank.failure for rank in again.ranks] == [None] * 3
        assert [rank.reports for rank in again.ranks] == [[]] * 3

    @pytest.mark.parametrize(
        ("flag", "methods"),
        [("declarative", ("train",)), ("predictive", ("predict", "predictor"))],
        ids=["declarative", "predictive"],
    )
    def test_declares_what_it_has(self, flag: str, methods: tuple[str, ...]) -> None:
        """Flags and methods of `Engine` agree.

        If this fails: the method exists and the flag isn't set, or the other way round.
        """
        engine = type(self.backend.engine())
        own = [name for name in methods if getattr(engine, name) is not getattr(Engine, name)]
        declared = getattr(self.backend.capabilities, flag)
        assert bool(own) == declared, f"{flag}={declared}, methods of Engine: {own or 'none'}"

    def test_rows_are_predicted_each_by_itself(self, trained: WorldRecord) -> None:
        """If declared: neither the grouping of rows nor other columns change predictions.

        If this fails: `predict` uses more than a row's features, or changes the order.
        """
        saved = self._checkpoint(trained)
        if not self.backend.capabilities.predictive or saved is None:
            # The flag and the method agree: see above.
            return
        table = kit_table()
        turned = table.select(table.column_names[::-1])
        whole, *parts = self._predicted(saved, table, turned.slice(0, 70), turned.slice(70))
        assert len(whole) == len(table)
        # Sums are rounded differently: which kernel of a library is used depends on how many rows
        # there are, and on the CPU.
        np.testing.assert_allclose(np.concatenate(parts), whole, rtol=_ROUNDING, atol=_ROUNDING)

    def test_any_number_of_workers_ends_in_the_same_files(
        self, trained: WorldRecord, tmp_path: Path
    ) -> None:
        """If declared (`exact_scaling`): one and three workers save the same files as two.

        If this fails: something depends on how the rows are split, or on the order in which the
        ranks' numbers are added up.
        """
        if not self.backend.capabilities.exact_scaling:
            # Without the promise, small differences are allowed.
            return
        for world_size in (1, 3):
            path = tmp_path / str(world_size)
            other = run_world(self.backend, data=kit_table(), path=path, world_size=world_size)
            assert other.saved(0) == trained.saved(0) != {}

    def test_declarative_training(self, trained: WorldRecord) -> None:
        """If declared: `Engine.train` reports every step, from 1. Otherwise such a job is rejected.

        If this fails: only some ranks report a step.
        """
        if not self.backend.capabilities.declarative:
            self._assert_needs_function()
            return
        steps = [[report.step for report in rank.reports] for rank in trained.ranks]
        assert steps[0]
        assert steps == [list(range(1, len(steps[0]) + 1))] * 2

    def test_gpu(self) -> None:
        """If declared: a job on GPUs is accepted. Otherwise an error names the device.

        If this fails: `problems` contradicts `capabilities.devices`.
        """
        job = dataclasses.replace(_job(self.backend), use_gpu=True)
        problems = [p for p in backend_problems(self.backend, job) if "use_gpu" in p.field]
        if Device.GPU in self.backend.capabilities.devices:
            assert problems == []
        else:
            assert any("gpu" in problem.what.lower() for problem in problems)

    def test_leaving_frees_every_port(self, listening: WorldRecord) -> None:
        """A process that has left the collective listens on no port any more.

        If this fails: a server, tracker or store outlives the `with` block that made it.
        """
        assert [(rank.leaks or {}).get("ports") for rank in listening.ranks] == [[], []]

    def test_leaving_ends_every_process(self, listening: WorldRecord) -> None:
        """A process that has left the collective has no process left that it has started.

        If this fails: a helper outlives the `with` block that started it. With `num_workers=0` it
        would outlive the run, in the user's own process.
        """
        assert [(rank.leaks or {}).get("processes") for rank in listening.ranks] == [[], []]

    def test_no_port_is_open_to_others(self, listening: WorldRecord) -> None:
        """While ranks of one machine train, nothing connects to them at another address.

        If this fails: a server listens at all addresses. Use `Member.listen_host`, or `reached_at`.
        """
        assert [port for report in _reports(listening) for port in report["open"]] == []

    def test_no_port_is_fixed(self, listening: WorldRecord, tmp_path: Path) -> None:
        """Ranks join while others use the ports at which the ranks of another run listened.

        If this fails: the number of a port is written in the engine. Use `listening_socket` or
        `held_port`.
        """
        ports = {port for report in _reports(listening) for port in report["ports"]}
        with ExitStack() as stack:
            for port in ports:
                with suppress(OSError):  # another process uses it already
                    stack.enter_context(socket.create_server(("", port)))
            assert len(_reports(self._list_ports(tmp_path))) == 2

    def test_leaving_restores_the_environment(self, listening: WorldRecord) -> None:
        """A process that has left the collective has the environment that it had before.

        If this fails: `joined` or `offering` sets variables and doesn't restore them.
        """
        assert [(rank.leaks or {}).get("variables") for rank in listening.ranks] == [[], []]

    def test_what_training_raises_is_told(self, tmp_path: Path) -> None:
        """An exception of the training function is reported as it is, also `sys.exit(1)`.

        If this fails: something that `joined` or `offering` has started ends the process first.
        """
        kinds: dict[Kind, str] = {"exception": "InjectedError", "exit": "SystemExit"}
        for kind, name in kinds.items():
            fault = Fault(rank=1, at_step=1, kind=kind)
            failure = self._count_steps(tmp_path / kind, fault=fault).ranks[1].failure
            assert failure is not None, f"no failure was reported for the fault {kind!r}"
            assert name in failure.failure.message

    @classmethod
    def _list_ports(cls, path: Path) -> WorldRecord:
        return run_world(cls.backend, data=kit_table(), path=path, training_function=list_ports)

    @classmethod
    def _count_steps(
        cls, path: Path, *, world_size: int = 2, fault: Fault | None = None
    ) -> WorldRecord:
        return run_world(
            cls.backend,
            data=kit_table(),
            path=path,
            world_size=world_size,
            training_function=count_steps,
            training_config={"fault": fault},
        )

    @classmethod
    def _checkpoint(cls, record: WorldRecord) -> Path | None:
        return record.whole_checkpoint(cls.backend.capabilities.checkpoint)

    def _predicted(self, saved: Path, *tables: pa.Table) -> list[Any]:
        """Predict each table with the model that was saved."""
        engine = self.backend.engine()
        predict = engine.predictor(saved, **self.prediction_options)

        def predicted(rows: pa.Table) -> Any:
            names = rows.column_names
            read = engine.model_columns(saved, names, **self.prediction_options)
            return np.asarray(predict(rows.select(list(names if read is None else read))))

        return [predicted(table) for table in tables]

    @classmethod
    def _train(cls, path: Path, data: pa.Table, *, world_size: int = 2) -> WorldRecord:
        problems = list(backend_problems(cls.backend, _job(cls.backend)))
        if problems:
            pytest.fail("The backend refuses the kit's data:\n" + "\n".join(map(str, problems)))
        function = cls.training_function
        if function is None and not cls.backend.capabilities.declarative:
            pytest.fail(
                "The backend isn't declarative: set training_function on the test class, so that a "
                "model is trained."
            )
        declarative = cls.backend.capabilities.declarative
        record = run_world(
            cls.backend,
            data=data,
            path=path,
            world_size=world_size,
            training_function=None if declarative else function,
            training_config=None if declarative else {},
        )
        failures = [str(rank.failure) for rank in record.ranks if rank.failure]
        assert not failures, "\n".join(failures)
        assert all(rank.done for rank in record.ranks), "a rank ended without a message"
        return record

    def _assert_needs_function(self) -> None:
        problems = list(function_problems(RunSpec(backend=self.backend)))
        assert [problem.field for problem in problems] == ["train_loop_per_worker"]


def _reports(world: WorldRecord) -> list[Mapping[str, Any]]:
    """The ranks' reports, once all ranks have ended well."""
    assert [rank.failure for rank in world.ranks] == [None] * len(world.ranks)
    return [report.metrics for rank in world.ranks for report in rank.reports]


def _job(backend: Backend) -> Job:
    table = kit_table()
    info = DatasetInfo(name="train", columns=tuple(table.column_names), num_rows=table.num_rows)
    return Job(
        num_workers=2,
        use_gpu=False,
        cpus_per_worker=1,
        has_training_function=not backend.capabilities.declarative,
        datasets={"train": info},
    )
