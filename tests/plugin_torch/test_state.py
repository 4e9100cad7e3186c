"""What `TrainingState` refuses, and what it says then; in this process."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.plugin_torch.conftest import Run

import polytrain
from polytrain import TrainingFailedError
from polytrain_torch import TrainingState, prepare_model, seed_everything
from polytrain_torch.safe_serialization import loaded, save_safely


def layer() -> torch.nn.Linear:
    return torch.nn.Linear(2, 1)


def test_a_part_has_a_state() -> None:
    with pytest.raises(TypeError, match=r"epoch: a int has no state_dict.*state\.report\(…, epoch"):
        TrainingState(model=layer(), epoch=3)


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    save_safely({"lr": 0.1, "names": ["a"], "weights": torch.ones(2)}, tmp_path / "state.pt")
    assert loaded(tmp_path / "state.pt")["names"] == ["a"]
    with pytest.raises(TypeError, match=r"can't hold pathlib.*weights_only"):
        save_safely({"path": tmp_path}, tmp_path / "state.pt")


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
