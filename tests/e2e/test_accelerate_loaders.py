"""Loaders that Accelerate prepares: a restart gets the batches that are left, and no other ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import torch_runs
from tests.e2e.journals import journal
from tests.e2e.torch_runs import HUGGING_FACE
from tests.sweeps import only_in_sweep

from polytrain import FailureConfig, Result, RunConfig, TrainingFailedError

STEPS = 6
"""Steps of an epoch: 44 rows are 11 batches of 4, and 2 ranks get one each."""


def train(config: dict[str, Any]) -> list[Any]:
    """Rank `rank`, or all, dies at a place of a step, counted from 1, in the first attempt.

    Each rank returns the sums of the rows that were trained on, and the weights.
    """
    import os
    import signal

    import torch
    from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
    from torch.utils.data import DataLoader, IterableDataset, TensorDataset

    import polytrain
    from polytrain_torch.accelerate import report, restore

    class Rows:
        """Sums of all ranks' rows by step, as a part of the state."""

        def __init__(self) -> None:
            self.sums: list[list[float]] = []

        def state_dict(self) -> dict[str, Any]:
            return {"sums": [*self.sums]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.sums = [*state["sums"]]

    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(rows)

    context = polytrain.get_context()
    dies = context.get_attempt() == 0 and config["rank"] in ("all", context.get_world_rank())

    def at(place: str) -> None:
        if dies and (place, len(seen.sums)) == (config["place"], config["step"]):
            os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0)
    chosen = DataLoaderConfiguration(
        use_seedable_sampler=config.get("seedable", False),
        dispatch_batches=config.get("dispatches"),
        split_batches=config.get("splits", False),
    )
    every = config.get("accumulates", 1)
    accelerator = Accelerator(dataloader_config=chosen, gradient_accumulation_steps=every)
    inner = torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
    )
    x = torch.arange(3.0 * 44).reshape(-1, 3) / 44
    rows = TensorDataset(x, x.sum(1))
    seen = Rows()
    accelerator.register_for_checkpointing(seen)
    model, optimizer, loader, other = accelerator.prepare(
        inner,
        torch.optim.Adam(inner.parameters(), lr=0.01),
        DataLoader(Stream(), batch_size=4)
        if config.get("streams")
        else DataLoader(
            rows,
            batch_size=config.get("size", 4),
            shuffle=True,
            num_workers=config.get("processes", 0),
        ),
        DataLoader(rows, batch_size=4),
    )

    def error_in(batches: Any) -> float:
        with torch.no_grad():
            model.eval()
            error = sum((model(x)[:, 0] - y).square().sum().item() for x, y in batches)
            model.train()
        return error

    torch.manual_seed(accelerator.process_index)
    done = restore(accelerator)
    looks = config.get("looks", ())
    if "next" in looks:
        next(iter(loader))
    if "held" in looks:
        held = iter(loader)
        next(held)
    if "other" in looks:
        next(iter(other))
    if "break" in looks:
        for _ in loader:
            break
    if "pass" in looks:
        error_in(other)
    for epoch in range(done.get("epoch", 0), 3):
        if "each epoch" in looks:
            next(iter(loader))
        batches = loader
        if config.get("skips") and "batches" in done:
            # Since then, the loop may have got further.
            batches = skip_first_batches(loader, done.pop("batches"))
        if config.get("nests") == "pairs":
            batches = (batch for batch, _ in zip(loader, loader, strict=True))
        for x, y in batches:
            seen.sums.append(accelerator.gather(x.sum()[None]).tolist())
            with accelerator.accumulate(model):
                loss = (model(x)[:, 0] - y).square().mean()
                at("forward")
                accelerator.backward(loss)
                at("backward")
                optimizer.step()
                optimizer.zero_grad()
            at("step")
            if config.get("nests") == "accuracy" and len(seen.sums) % 2 == 0:
                error_in(loader)
            if config["reports"] and len(seen.sums) % config.get("every", 4) == 0:
                given = len(seen.sums) - epoch * STEPS
                report(accelerator, {"steps": len(seen.sums)}, epoch=epoch, batches=given)
        error = error_in(other)
        report(accelerator, {"steps": len(seen.sums), "error": error}, epoch=epoch + 1)
    return [seen.sums, [each.tolist() for each in inner.state_dict().values()]]


def fit(
    quiet: RunConfig,
    place: str = "",
    step: int = 0,
    rank: int | str = 1,
    **config: Any,
) -> Result:
    chosen = {"place": place, "step": step, "rank": rank, "reports": False, **config}
    return torch_runs.fit(quiet, train, chosen, libraries=HUGGING_FACE)


def log(result: Result) -> str:
    """Return what rank 0 has printed. There is no file of nothing."""
    return "".join(each.read_text("utf-8") for each in Path(result.path, "logs").glob("rank_0.log"))


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "seedable": {"seedable": True},
    "processes": {"processes": 2},
    "dispatched": {"dispatches": True},
    "split": {"splits": True},
    "accumulated": {"accumulates": 2},
    "reporting": {"reports": True},
    "looking": {"looks": ["next"], "reports": True},
    "looking twice": {"looks": ["next", "other", "break"]},
    "looking in each epoch": {"looks": ["each epoch"]},
    "holding": {"looks": ["held"]},
    "passing": {"looks": ["pass"]},
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    @cache
    def made(kind: str) -> Result:
        return fit(
            RunConfig(storage_path=tmp_path_factory.mktemp(kind), progress=False), **KINDS[kind]
        )

    return made


# In `make test`, each kind of loader once. `test_accelerate` accumulates gradients too.
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "place", "step", "rank"),
    [
        # Within an epoch, in its first and in its last step, and between two.
        only_in_sweep("plain", "forward", 9, 1),
        ("plain", "backward", STEPS + 1, 0),
        only_in_sweep("plain", "forward", 2 * STEPS, 1),
        only_in_sweep("seedable", "step", STEPS, 0),
        ("processes", "backward", 8, 1),
        only_in_sweep("processes", "forward", STEPS + 1, 1),
        ("dispatched", "forward", 9, 0),
        only_in_sweep("split", "forward", 15, 1),
        only_in_sweep("accumulated", "backward", 10, 0),
        ("looking twice", "forward", 4, 1),
        only_in_sweep("looking in each epoch", "forward", 9, 1),
        only_in_sweep("holding", "forward", 9, 0),
        only_in_sweep("passing", "forward", 4, 1),
    ],
)
def test_no_step_is_repeated(
    quiet: RunConfig,
    undisturbed: Callable[[str], Result],
    kind: str,
    place: str,
    step: int,
    rank: int,
) -> None:
    expected = undisturbed(kind)
    killed = fit(quiet, place, step, rank, **KINDS[kind])
    [asked] = journal(killed.path, "SurvivorsAsked")
    # Between two epochs, a report has just been made.
    assert asked["reason"] in ("", f"the checkpoint of step {(step - 1) // STEPS} is as new")
    assert killed.restarts == 1
    assert killed.return_values == expected.return_values
    assert killed.history == expected.history


def test_a_script_that_skips_batches_itself_skips_no_others(
    quiet: RunConfig, undisturbed: Callable[[str], Result]
) -> None:
    """Its number is that of its last report; the state is a later step's."""
    killed = fit(quiet, "forward", 2 * STEPS - 1, reports=True, skips=True)
    [asked] = journal(killed.path, "SurvivorsAsked")
    assert asked["reason"] == ""
    assert killed.return_values == undisturbed("reporting").return_values


@pytest.mark.sweep
@pytest.mark.parametrize("skips", [False, only_in_sweep(True)])
def test_a_report_within_an_epoch_has_the_place(
    quiet: RunConfig, undisturbed: Callable[[str], Result], skips: bool
) -> None:
    """With all ranks lost, the run goes back to it."""
    killed = fit(quiet, "forward", 10, "all", reports=True, skips=skips)
    assert killed.restarts == 1
    assert killed.return_values == undisturbed("reporting").return_values
    # A loop that skips them itself must know that they don't come.
    line = "Accelerate's data loader 0 continues after batch 2 of its epoch"
    assert log(killed).count(line) == (not skips)


def test_a_look_at_the_first_batch_leaves_the_place(
    quiet: RunConfig, undisturbed: Callable[[str], Result]
) -> None:
    killed = fit(quiet, "forward", 10, "all", **KINDS["looking"])
    assert killed.restarts == 1
    assert killed.return_values == undisturbed("looking").return_values


@pytest.mark.sweep
@pytest.mark.parametrize("nests", ["accuracy", only_in_sweep("pairs")])
def test_an_epoch_begins_again_whose_loop_has_another_one_within_it(
    quiet: RunConfig, nests: str
) -> None:
    killed = fit(quiet, "forward", STEPS + 5, nests=nests, reports=True)
    [asked] = journal(killed.path, "SurvivorsAsked")
    assert "Accelerate's data loader 0 within a loop over it" in asked["reason"]
    assert killed.restarts == 1
    # The last report was in the second step of the epoch.
    assert len(killed.return_values[0][0]) == STEPS + 2 + 2 * STEPS
    assert log(killed).count("within a loop over it") == 2  # one an attempt


def test_a_report_in_the_first_step_of_two_loops_at_once_leaves_out_no_batch(
    quiet: RunConfig,
) -> None:
    killed = fit(quiet, "forward", 2, nests="pairs", reports=True, every=1)
    assert killed.restarts == 1
    assert len(killed.return_values[0][0]) == 1 + 3 * STEPS


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        only_in_sweep("reporting", 4),
        ("reporting", 3),
        only_in_sweep("reporting", 2),
        only_in_sweep("dispatched", 4),
        ("dispatched", 5),
    ],
)
def test_other_workers_get_the_rows_that_are_left(
    quiet: RunConfig, undisturbed: Callable[[str], Result], kind: str, size: int
) -> None:
    """Two had 32 of the 44 rows when they reported, and 3 take batches of another size."""
    config = {**KINDS[kind], "place": "forward", "step": 5, "rank": "all", "reports": True}
    fits = partial(torch_runs.fit, quiet, train, libraries=HUGGING_FACE, name="run")
    with pytest.raises(TrainingFailedError):
        fits(config, failure_config=FailureConfig(max_failures=0))
    resumed = fits({**config, "rank": None, "size": size}, workers=3)
    of_two, of_three = undisturbed(kind).return_values[0][0], resumed.return_values[0][0]
    assert of_three[:4] == of_two[:4]
    per_step = 3 * size
    assert len(of_three) == 4 + -(-12 // per_step) + 2 * -(-44 // per_step)
    left_by_two, left_by_three = (
        [each for step in steps[4:] for each in step] for steps in (of_two, of_three)
    )
    # A loader completes the last step with a repeated batch; a dispatcher divides its rows.
    batches = {2: 3, 3: 12 // size} if kind == "reporting" else {2: 4, 3: 3}
    assert sum(left_by_three[: batches[3]]) == pytest.approx(sum(left_by_two[: batches[2]]))


def test_a_stream_has_no_place(quiet: RunConfig) -> None:
    result = fit(quiet, "forward", STEPS + 2, streams=True)
    [asked] = journal(result.path, "SurvivorsAsked")
    assert "nobody can tell where its data loader of an IterableDataset is" in asked["reason"]
