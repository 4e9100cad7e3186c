"""What `TrainingState` refuses, and what it says then; in this process."""

from __future__ import annotations

import gc
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tests.plugin_torch.conftest import Run
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import polytrain
from polytrain import (
    Checkpoint,
    CheckpointConfig,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    ValidationConfig,
    make_trainer,
)
from polytrain.testing.local_world import run_world
from polytrain_torch import Torch, TrainingState, prepare_model, seed_everything
from polytrain_torch.checkpoints.safe_serialization import loaded, refuse_unsafe, save_safely
from polytrain_torch.checkpoints.state_digests import digests_held
from polytrain_torch.survivors.keeper import keeper
from polytrain_torch.survivors.loop_variables import Loop, frames_from


def layer() -> torch.nn.Linear:
    return torch.nn.Linear(2, 1)


def test_a_part_has_a_state() -> None:
    with pytest.raises(
        TypeError, match=r"epoch: an int has no state_dict.*state\.report\(…, epoch"
    ):
        TrainingState(model=layer(), epoch=3)


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    save_safely({"lr": 0.1, "names": ["a"], "weights": torch.ones(2)}, tmp_path / "state.pt")
    assert loaded(tmp_path / "state.pt")["names"] == ["a"]
    with pytest.raises(TypeError, match=r"can't hold pathlib.*weights_only"):
        save_safely({"path": tmp_path}, tmp_path / "state.pt")
    refuse_unsafe({"groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], "weights": torch.ones(2)})
    with pytest.raises(TypeError, match=r"can't hold pathlib.*weights_only"):
        refuse_unsafe({"groups": [{"lr": 0.1, "path": tmp_path}]})


def validate(checkpoint: Checkpoint) -> dict[str, float]:
    with checkpoint.as_directory() as directory:
        return {"weight": float(torch.load(Path(directory, "model.pt"))["weight"][0, 0])}


def test_a_report_requests_a_validation(run: Run) -> None:
    def train() -> None:
        model = layer()
        state = TrainingState(model=model)
        for step in range(3):
            torch.nn.init.constant_(model.weight, step)
            state.report({"step": step}, validation=step > 0, epoch=step)

    result = run(train, validation_config=ValidationConfig(validate))
    assert [metrics.get("weight") for metrics in result.history] == [None, 1, 2]


def test_an_option_of_a_report_is_no_progress(run: Run) -> None:
    def train() -> None:
        TrainingState(model=layer()).report({}, epoch=1, upload="sync")

    with pytest.raises(TrainingFailedError, match=r"upload= is an option of polytrain\.report"):
        run(train)


def test_an_optimizer_of_what_sharding_has_replaced_is_refused(run: Run) -> None:
    def train() -> None:
        model = layer()
        before = torch.optim.SGD(model.parameters())
        model = prepare_model(model, parallel_strategy="fsdp")
        TrainingState(model=model, optimizer=torch.optim.SGD(model.parameters()))
        TrainingState(model=model, optimizer=before)

    with pytest.raises(
        TrainingFailedError, match=r"optimizer: .*trains no parameter.*Make it after"
    ):
        run(train)


def test_beside_a_sharded_model_other_parameters_are_trained(run: Run) -> None:
    """A bare one, of a shape that the model has as well, and those of a model that is no part."""

    def train() -> None:
        temperature, other = torch.nn.Parameter(torch.ones(1)), torch.nn.Linear(4, 2)
        model = prepare_model(layer(), parallel_strategy="fsdp")
        TrainingState(
            model=model,
            optimizer=torch.optim.SGD(model.parameters()),
            of_temperature=torch.optim.SGD([temperature]),
            of_other=torch.optim.SGD(other.parameters()),
        ).report({})

    assert run(train).checkpoint is not None


def test_an_optimizer_of_the_trained_ones_that_sharding_has_replaced_is_refused(run: Run) -> None:
    def train() -> None:
        model = torch.nn.Sequential(layer(), layer())
        model[0].requires_grad_(False)
        before = torch.optim.SGD([each for each in model.parameters() if each.requires_grad])
        TrainingState(model=prepare_model(model, parallel_strategy="fsdp"), optimizer=before)

    with pytest.raises(TrainingFailedError, match=r"optimizer: .*trains no parameter"):
        run(train)


def test_what_a_library_has_saved_is_its_own_to_load(run: Run, tmp_path: Path) -> None:
    def train() -> None:
        part = tmp_path / "part"
        part.mkdir()
        (part / "lightning.ckpt").touch()
        polytrain.report({}, checkpoint=polytrain.Checkpoint.from_directory(part))

    with pytest.raises(FileNotFoundError, match=r"no model\.pt; it has lightning\.ckpt.*Lightning"):
        run(train).load_model()


def test_random_numbers_go_on(run: Run) -> None:
    drawn: list[list[float]] = []

    def draw() -> None:
        numbers = [torch.rand(()).item(), float(np.random.rand()), random.random()]
        drawn.append(numbers)

    def first() -> None:
        seed_everything(5)
        draw()
        TrainingState(model=layer()).report({})
        draw()

    def second() -> None:
        assert TrainingState(model=layer()).restore() == {}
        draw()

    run(second, restore_from=run(first).checkpoint)
    assert drawn[2] == drawn[1] != drawn[0]


@pytest.mark.parametrize("has_part", [False, True])
def test_what_a_communication_hook_keeps_is_missed(
    run: Run, caplog: pytest.LogCaptureFixture, has_part: bool
) -> None:
    class Kept:
        def __init__(self, state: PowerSGDState) -> None:
            self.state = state

        def state_dict(self) -> dict[str, Any]:
            return {"iteration": self.state.iter}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state.iter = state["iteration"]

    def train() -> None:
        model = prepare_model(layer())
        state = PowerSGDState(None)
        model.register_comm_hook(state, powerSGD_hook)
        parts = {"kept": Kept(state)} if has_part else {}
        TrainingState(model=model, **parts).report({})

    run(train)
    assert ("communication hook of DDP has a PowerSGDState" in caplog.text) is not has_part


def test_parts_have_the_names_that_they_had(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    def first() -> None:
        TrainingState(model=layer(), ema=layer()).report({}, epoch=1)

    def fewer() -> None:
        assert TrainingState(model=layer()).restore() == {"epoch": 1}
        polytrain.report({})

    def other() -> None:
        TrainingState(network=layer()).restore()

    checkpoint = run(first).checkpoint
    run(fewer, restore_from=checkpoint)
    assert "Not restored" in caplog.text
    assert "ema" in caplog.text
    with pytest.raises(TrainingFailedError, match=r"has no network; it has ema, model"):
        run(other, restore_from=checkpoint)


@pytest.mark.parametrize(("strategy", "written_by"), [(None, "rank_0"), ("fsdp", "every_rank")])
def test_groups_that_training_has_added_are_added_again_before_they_are_restored(
    run: Run, strategy: str | None, written_by: str
) -> None:
    """As for layers that are unfrozen later: which there are depends on the progress."""
    run = partial(run, written_by=written_by)

    def parts(epoch: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        layers = torch.nn.Sequential(layer(), layer())
        model = layers if strategy is None else prepare_model(layers, parallel_strategy=strategy)
        optimizer = torch.optim.Adam(model[1].parameters(), lr=0.1)
        if epoch:
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
        return model, optimizer

    def first() -> None:
        model, optimizer = parts(1)
        state = TrainingState(model=model, optimizer=optimizer)
        assert state.progress == {}
        state.report({}, epoch=1)

    def without() -> None:
        model, optimizer = parts(0)
        TrainingState(model=model, optimizer=optimizer).restore()

    def again() -> None:
        model, optimizer = parts(0)
        state = TrainingState(model=model, optimizer=optimizer)
        assert state.progress == {"epoch": 1}
        optimizer.add_param_group({"params": model[0].parameters()})
        assert state.restore() == {"epoch": 1}
        polytrain.report({"lr": optimizer.param_groups[1]["lr"]})

    checkpoint = run(first).checkpoint
    with pytest.raises(
        TrainingFailedError,
        match=r"optimizer: the checkpoint has 2 parameter groups \(parameters: 2, 2\), and the "
        r"optimizer 1 parameter group .*state.progress says before.*\{'epoch': 1\}",
    ):
        run(without, restore_from=checkpoint)
    assert run(again, restore_from=checkpoint).metrics == {"lr": 0.01}


class Momentum(torch.optim.Optimizer):
    """Adds gradients up in float32, whatever the type of the parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each in self.param_groups[0]["params"]:
            state = self.state[each]
            state["sum"] = state.get("sum", torch.zeros(each.shape)) + each.grad.float() / 3
            each -= state["sum"].to(each.dtype)


class OwnSteps(torch.optim.Adam):
    """Counts its steps in a Python number, of which `Adam` makes a tensor when it is loaded."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each in self.param_groups[0]["params"]:
            state = self.state[each]
            state["step"] = state.get("step", 0) + 1
            state["sum"] = state.get("sum", torch.zeros(each.shape)) + each.grad.float() / 3


@pytest.mark.parametrize(
    ("kind", "dtype", "key"),
    [
        (torch.optim.NAdam, torch.float64, "mu_product"),
        (Momentum, torch.bfloat16, "sum"),
        (OwnSteps, torch.bfloat16, "sum"),
    ],
)
def test_an_optimizers_state_has_its_own_types_after_a_restart(
    run: Run, kind: Any, dtype: torch.dtype, key: str
) -> None:
    """If the weights have theirs; in other weights torch casts it."""
    states: list[torch.Tensor] = []

    def train(now: torch.dtype) -> None:
        torch.manual_seed(0)
        model = layer().to(now)
        optimizer = kind(model.parameters())
        state = TrainingState(model=model, optimizer=optimizer)
        if not state.restore():
            model(torch.ones(1, 2, dtype=now)).sum().backward()
            optimizer.step()
            state.report({}, epoch=1)
        states.append(optimizer.state[model.weight][key])

    checkpoint = run(lambda: train(dtype)).checkpoint
    run(lambda: train(dtype), restore_from=checkpoint)
    run(lambda: train(torch.float16), restore_from=checkpoint)
    before, after, cast = states
    assert after.dtype == before.dtype == torch.float32
    assert torch.equal(before, after)
    assert cast.dtype == torch.float16


def test_gradients_are_missing_only_between_backward_and_step(run: Run) -> None:
    """The step of some optimizers begins with the forward and the backward pass."""
    found: list[bool] = []

    def train() -> None:
        model = prepare_model(layer())
        optimizer = torch.optim.LBFGS(model.parameters())
        TrainingState(model=model, optimizer=optimizer).restore()
        keeps = keeper()
        assert keeps is not None

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            squared: torch.Tensor = model(torch.tensor([9.0, 1.0])).square().sum()
            squared.backward()
            return squared

        optimizer.step(loss)
        found.append(keeps.gradients.exist())
        loss()
        found.append(keeps.gradients.exist())
        optimizer.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=torch.finfo(torch.float32).max)
        scaler.scale(model(torch.tensor([1.0, 9.0])).square().sum()).backward()
        # It leaves the step out.
        scaler.step(optimizer)
        found.append(keeps.gradients.exist())

    run(train)
    assert found == [False, True, False]


def test_a_generator_that_is_a_part_is_known_to_come_back(run: Run) -> None:
    def train() -> None:
        state = TrainingState(model=layer(), numbers=(numbers := torch.Generator()))
        state.restore()
        keeps = keeper()
        assert keeps is not None
        batches = frames_from(sys._getframe())[:1]
        loop = Loop(batches, keeps.continuation.known())
        torch.rand(1, generator=numbers)
        carried.append(loop.carried(batches, {}, has_batch=True))
        print(numbers)

    carried: list[str | None] = []
    run(train)
    assert carried == [None]


@pytest.mark.parametrize("written_by", ["rank_0", "every_rank"])
def test_a_sharded_model_is_saved_before_the_first_step(tmp_path: Path, written_by: Any) -> None:
    """Neither saving nor restoring takes a step of the optimizer."""

    def train(steps: int, strategy: str | None) -> list[float]:
        torch.manual_seed(0)
        model = prepare_model(layer(), parallel_strategy=strategy)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        state = TrainingState(model=model, optimizer=optimizer)
        state.restore()
        if strategy is not None:
            state.report({})
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weight = model.weight
        return (weight.full_tensor() if strategy else weight).flatten().tolist()

    def function(config: dict[str, Any]) -> None:
        plain = train(2, None) if not config["resumes"] else config["expected"]
        assert train(2, "fsdp") == plain
        polytrain.report({"weights": plain})

    def run(config: dict[str, Any], **options: Any) -> Any:
        return make_trainer(
            "torch",
            function,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(
                storage_path=tmp_path,
                progress=False,
                checkpoint_config=CheckpointConfig(written_by=written_by),
            ),
            **options,
        ).fit()

    first = run({"resumes": False})
    config = {"resumes": True, "expected": first.metrics["weights"]}
    run(config, restore_from=first.checkpoint)


def test_gradients_of_a_sharded_model_still_wait_for_a_step_after_the_first_save(run: Run) -> None:
    """A trial step of an optimizer without a state uses none of them."""

    def train() -> None:
        model = prepare_model(layer(), parallel_strategy="fsdp")
        state = TrainingState(model=model, optimizer=torch.optim.SGD(model.parameters()))
        state.restore()
        model(torch.ones(1, 2)).sum().backward()
        keeps = keeper()
        assert keeps is not None
        for _ in range(2):
            state.report({})
            assert keeps.lacks_gradients()

    run(train)


class Branches(torch.nn.Module):
    """Has tied weights, and a layer that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.tied, self.other = layer(), layer(), layer()
        self.tied.weight = self.used.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.used(rows) + self.tied(rows)
        return total


@pytest.mark.parametrize("written_by", ["rank_0", "every_rank"])
def test_sharded_parameters_that_no_loss_has_used_have_no_state_after_a_restart(
    tmp_path: Path, written_by: Any
) -> None:
    """Evaluations, after which FSDP doesn't give the model its shards back, change nothing."""
    found: list[dict[str, tuple[float, torch.dtype]]] = []
    rows = torch.ones(1, 2, dtype=torch.float64)

    def train() -> None:
        model = prepare_model(Branches().double(), parallel_strategy="fsdp")
        optimizer = torch.optim.NAdam(model.parameters(), lr=0.1)

        def evaluate() -> None:
            with torch.no_grad():
                model(rows)

        evaluate()
        state = TrainingState(model=model, optimizer=optimizer)
        evaluate()
        if not state.restore():
            model(rows).sum().backward()
            optimizer.step()
            evaluate()
            gc.collect()  # An earlier test's state may wait for it, in a cycle.
            assert not digests_held()
            state.report({}, step=1)
        states = {name: optimizer.state.get(each) for name, each in model.named_parameters()}
        found.append(
            {
                name: (float(each["step"]), each["mu_product"].dtype)
                for name, each in states.items()
                if each
            }
        )

    options = CheckpointConfig(written_by=written_by)
    config = RunConfig(storage_path=tmp_path, progress=False, checkpoint_config=options)
    inline = ScalingConfig(num_workers=0)
    first = make_trainer("torch", train, scaling_config=inline, run_config=config).fit()
    make_trainer(
        "torch",
        train,
        scaling_config=inline,
        run_config=config,
        restore_from=first.checkpoint,
    ).fit()
    # torch casts the product to the parameters' type.
    assert (
        found == [dict.fromkeys(("used.weight", "used.bias", "tied.bias"), (1, torch.float32))] * 2
    )


def test_a_process_trains_a_sharded_model_again(run: Run) -> None:
    """torch keeps results for equal meshes, with the names of groups that have ended since."""

    def train() -> None:
        state = TrainingState(model=prepare_model(layer(), parallel_strategy="fsdp"))
        state.restore()
        state.report({})

    # As if the process had had other groups, after which the next one is named.
    torch.distributed.distributed_c10d._world.group_count = 12
    first = run(train)
    run(train, restore_from=first.checkpoint)


def test_a_model_that_could_not_be_restored_is_not_saved(run: Run) -> None:
    """It has more than plain data, which a restart doesn't load."""

    class Named(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return Path("vocabulary")

        def set_extra_state(self, state: Any) -> None:
            """Nothing to keep."""

    def train() -> None:
        TrainingState(model=Named(2, 1)).report({})

    with pytest.raises(TrainingFailedError, match=r"can't hold pathlib.*weights_only"):
        run(train)


class Extra(torch.nn.Linear):
    """Saves something that it doesn't load."""

    def get_extra_state(self) -> Any:
        return 1


class Renamed(torch.nn.Linear):
    """Saves its weights under names that it doesn't load."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {f"old_{name}": each for name, each in super().state_dict().items()}


class Broken:
    def state_dict(self) -> dict[str, int]:
        return {"count": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise KeyError("counts")


class Forgetful(torch.optim.SGD):
    """Has an attribute of its own, and can't load its state."""

    def __init__(self, parameters: Any, *, loads: bool) -> None:
        super().__init__(parameters, lr=0.1)
        self.loads = loads

    def load_state_dict(self, state_dict: Any) -> None:
        if not self.loads:
            raise KeyError("count")
        super().load_state_dict(state_dict)


def forgetful(*, loads: bool) -> dict[str, Any]:
    return {"optimizer": Forgetful([torch.nn.Parameter(torch.ones(1))], loads=loads)}


def test_a_custom_optimizer_that_can_be_loaded_is_saved(run: Run) -> None:
    def train() -> None:
        TrainingState(**forgetful(loads=True)).report({"done": True})

    assert run(train).metrics == {"done": True}


class Measured(torch.optim.SGD):
    """Looks at values while it loads them."""

    def load_state_dict(self, state_dict: Any) -> None:
        float(self.param_groups[0]["params"][0].detach().sum())
        super().load_state_dict(state_dict)


def test_a_custom_optimizer_that_looks_at_values_is_saved(run: Run) -> None:
    def train() -> None:
        optimizer = Measured([torch.nn.Parameter(torch.ones(1))])
        TrainingState(optimizer=optimizer).report({"done": True})

    assert run(train).metrics == {"done": True}


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (lambda: forgetful(loads=False), "optimizer: .*raised KeyError: 'count'"),
        (lambda: {"model": Extra(2, 1)}, "(?s)model: .*_extra_state.*needs set_extra_state"),
        (lambda: {"model": Renamed(2, 1)}, "(?s)model: .*can't be loaded.*old_weight"),
        (lambda: {"counter": Broken()}, "counter: .*raised KeyError: 'counts'"),
    ],
)
def test_what_can_be_saved_and_not_loaded_fails_at_the_first_save(
    run: Run, part: Any, message: str
) -> None:
    def train() -> None:
        TrainingState(**part()).report({})

    with pytest.raises(TrainingFailedError, match=message):
        run(train)


def test_reading_back_touches_nothing(run: Run) -> None:
    """Neither values nor the graph of a step that isn't over; and parts share the optimizer."""

    def train() -> None:
        model = prepare_model(torch.nn.Sequential(layer(), torch.nn.BatchNorm1d(1)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=9)
        averaged = torch.optim.swa_utils.AveragedModel(model.module)
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        state = TrainingState(**parts, averaged=averaged, scaler=torch.amp.GradScaler("cpu"))

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.randn(4, 2)).square().mean()
            loss.backward(retain_graph=True)
            optimizer.step()
            scheduler.step()
            return model(torch.randn(4, 2)).square().mean()

        loss = step()
        groups = optimizer.param_groups
        before = [each.clone() for each in model.parameters()]
        state.report({})
        loss.backward()
        assert optimizer.param_groups is groups
        assert all(map(torch.equal, before, model.parameters()))
        step()

    run(train)


class Converting(torch.nn.Linear):
    """Converts states of its first version, whose weights had another name."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *others: Any) -> None:
        if metadata.get("version", 1) < self._version:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")
        super()._load_from_state_dict(state, prefix, metadata, *others)


def test_a_module_that_converts_older_states_is_saved(run: Run) -> None:
    def train() -> None:
        TrainingState(model=Converting(2, 1)).report({"done": True})

    assert run(train).metrics == {"done": True}


class Average:
    """Averages a sharded model's weights by steps, in shards."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.weights = {name: each.detach().clone() for name, each in model.named_parameters()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.weights

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, each in state.items():
            self.weights[name].copy_(each)


@pytest.mark.parametrize("written_by", ["rank_0", "every_rank"])
@pytest.mark.parametrize(
    ("kind", "loads", "message"),
    [
        (torch.nn.Linear, True, None),
        (Extra, True, "(?s)model: .*_extra_state.*needs set_extra_state"),
        (torch.nn.Linear, False, "optimizer: .*raised KeyError: 'count'"),
    ],
)
def test_sharded_parts_are_read_back_too(
    tmp_path: Path, written_by: Any, kind: Any, loads: bool, message: str | None
) -> None:
    """Neither values nor the optimizer's groups are touched, and training continues.

    The gradients of the last step are still there, with which another one would change values.
    """

    def train() -> None:
        layers = torch.nn.Sequential(torch.nn.Linear(2, 2), kind(2, 2), torch.nn.BatchNorm1d(2))
        model = prepare_model(layers, parallel_strategy="fsdp", sharded_layers=[layers[0]])
        optimizer = Forgetful(model.parameters(), loads=loads)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        state = TrainingState(
            model=model, optimizer=optimizer, scheduler=scheduler, average=Average(model)
        )

        def step() -> list[torch.Tensor]:
            optimizer.zero_grad()
            model(torch.tensor([[1.0, 2.0], [3.0, 5.0]])).square().mean().backward()
            optimizer.step()
            return values()

        def values() -> list[torch.Tensor]:
            return [each.full_tensor().clone() for each in model.parameters()]

        before, groups = step(), optimizer.param_groups
        state.report({"done": True})
        assert optimizer.param_groups is groups
        assert all(map(torch.equal, before, values()))
        assert not all(map(torch.equal, before, step()))
        optimizer.zero_grad()
        state.restore(polytrain.get_checkpoint())
        assert all(map(torch.equal, before, values()))

    config = CheckpointConfig(written_by=written_by)
    trainer = make_trainer(
        "torch",
        train,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=tmp_path, progress=False, checkpoint_config=config),
    )
    if message is None:
        assert trainer.fit().metrics == {"done": True}
        return
    with pytest.raises(TrainingFailedError, match=message):
        trainer.fit()


def test_what_only_all_ranks_gather_has_no_digests(run: Run) -> None:
    """Rank 0 alone makes them, so it would wait for the others."""

    def train() -> None:
        of_all = FullyShardedDataParallel(
            layer(),
            device_id=torch.device("cpu"),
            sharding_strategy=ShardingStrategy.NO_SHARD,
        )
        state = TrainingState(model=of_all, other=layer())
        assert {*digests_held()} == {f"other/{name}" for name in state.parts["other"].state_dict()}

    run(train)


def test_an_optimizer_of_two_sharded_models_is_refused(run: Run) -> None:
    def train() -> None:
        models = [prepare_model(layer(), parallel_strategy="fsdp") for _ in range(2)]
        both = [parameter for model in models for parameter in model.parameters()]
        TrainingState(first=models[0], second=models[1], optimizer=torch.optim.Adam(both))

    with pytest.raises(
        TrainingFailedError, match=r"optimizer: .*'first' and 'second'.*one optimizer for each"
    ):
        run(train)


def test_an_optimizer_that_is_spread_over_ranks_is_saved_whole(tmp_path: Path) -> None:
    def train(config: Any) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        def step(model: Any, optimizer: Any) -> list[float]:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            return [float(value) for each in model.parameters() for value in each.flatten()]

        def made() -> tuple[Any, Any]:
            model = prepare_model(layer())
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
            return model, optimizer

        model, optimizer = made()
        step(model, optimizer)
        directory = Path(config["directory"])
        TrainingState(model=model, optimizer=optimizer).save(directory=directory)
        torch.distributed.barrier()
        other, its = made()
        TrainingState(model=other, optimizer=its).restore(polytrain.Checkpoint(directory))
        polytrain.report({"before": step(model, optimizer), "after": step(other, its)})

    (tmp_path / "state").mkdir()
    record = run_world(
        Torch(timeout_s=60),
        data=pa.table({"x": [1.0, 2.0]}),
        path=tmp_path / "world",
        training_function=train,
        training_config={"directory": str(tmp_path / "state")},
    )
    failures = [str(rank.failure) for rank in record.ranks if rank.failure]
    assert not failures, "\n".join(failures)
    for rank in record.ranks:
        metrics = rank.reports[0].metrics
        assert metrics["after"] == metrics["before"]
