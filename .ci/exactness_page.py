"""Writes docs/exactness.md: each promise of exactness with the test that shows it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "exactness.md"

HEAD = """\
# What is exact

A model of XGBoost, for example, has the same bytes on one worker and on three, whatever was killed
on the way. Each row is a promise, and names the test that shows it.

- "yes": the same rows, or the same bits.
- "but for rounding": sums are added in another order.
- "no": the sentence says what happens instead.
"""

PROMISES: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "Rows": (
        (
            "each row once in an epoch, over kills and other numbers of workers",
            "yes",
            "tests/e2e/test_exactly_once.py::test_every_row_is_used_once_per_epoch",
        ),
        (
            "the batches of a mix of data sets, over kills and other numbers of workers",
            "yes",
            "tests/e2e/test_mix.py::test_a_mix_has_the_same_batches_after_kills_and_at_another_size",
        ),
        (
            "each row once in torch's data loaders",
            "yes",
            "tests/e2e/test_torch_sweep.py::test_every_row_comes_once_in_each_epoch",
        ),
        (
            "each row once in a Ray Data pipeline that yields the same blocks again",
            "yes",
            "tests/core/test_ray_stream.py"
            "::test_every_row_reaches_one_rank_and_the_epoch_goes_on_anywhere",
        ),
        (
            "an iterable data set without a state",
            "no: a restart begins its epoch again",
            "tests/e2e/test_torch_sweep.py::test_places_are_what_the_table_says",
        ),
        (
            "each row once in the rounds of a booster",
            "yes",
            "tests/e2e/test_exactly_once.py::test_every_round_of_boosting_uses_every_row_once",
        ),
        (
            "each row predicted once, over kills",
            "yes",
            "tests/e2e/test_prediction_output.py"
            "::test_a_kill_costs_no_more_than_what_was_not_finished",
        ),
        (
            "each step once in trackers",
            "yes",
            "tests/e2e/test_trackers.py::test_every_step_is_there_once",
        ),
    ),
    "Tree boosters": (
        (
            "the model at any number of workers",
            "yes",
            "tests/e2e/test_boosters.py::test_several_workers_draw_and_grow_what_one_does",
        ),
        (
            "the model after a kill",
            "yes",
            "tests/e2e/test_boosters.py::test_a_run_that_is_killed_ends_in_the_same_model",
        ),
        (
            "the model after a resume on another number of workers",
            "yes",
            "tests/e2e/test_boosters.py::test_a_run_that_goes_on_with_others_ends_in_the_same_model",
        ),
        (
            "the model of XGBoost alone on the same bins, without sampling",
            "yes",
            "tests/e2e/test_boosters.py::test_the_model_is_that_of_xgboost_alone",
        ),
        (
            "the trees of LightGBM alone on the same bins, where rows have one hessian",
            "yes",
            "tests/e2e/test_boosters.py::test_the_model_is_that_of_lightgbm_alone",
        ),
        (
            "LightGBM's `goss`, and random forests with bagging",
            "no: another number of workers samples other rows",
            "tests/e2e/test_boosters.py"
            "::test_what_the_frameworks_find_on_each_worker_depends_on_the_workers",
        ),
        (
            "no round is repeated if another worker is left",
            "yes",
            "tests/e2e/test_booster_survivors.py::test_no_round_is_repeated",
        ),
    ),
    "torch": (
        (
            "the weights at any number of workers, with virtual workers",
            "yes",
            "tests/plugin_torch/test_virtual_workers.py::test_any_number_of_workers_has_the_same_bits",
        ),
        (
            "the same, over kills",
            "yes",
            "tests/e2e/test_virtual_workers.py"
            "::test_kills_and_other_numbers_of_workers_change_no_bit",
        ),
        (
            "the same, with random numbers, dropout, augmentation, stochastic depth, BatchNorm, "
            "clipping, accumulation, mixed precision, averaged weights, schedulers, several models "
            "or unused parameters",
            "yes",
            "tests/e2e/test_virtual_table.py"
            "::test_a_run_that_is_killed_to_other_sizes_has_the_same_bits",
        ),
        (
            "the same, over a kill and compiled by inductor",
            "yes",
            "tests/e2e/test_virtual_compiled.py"
            "::test_compiled_code_has_the_same_bits_on_any_rank_and_after_a_kill",
        ),
        (
            "the weights on 1, 2, 3 or 4 workers, without virtual workers",
            "but for rounding, if the loss is a mean over rows",
            "tests/e2e/test_row_weights.py::test_every_door_ends_where_one_process_ends",
        ),
        (
            "the weights after a kill, on as many workers, with DDP",
            "yes",
            "tests/e2e/test_torch_state.py::test_a_killed_run_ends_in_the_same_weights",
        ),
        (
            "the same with FSDP2",
            "yes",
            "tests/e2e/test_torch_state.py::test_a_killed_sharded_run_ends_in_the_same_weights",
        ),
        (
            "the same with FSDP2 on a mesh of replicas by shards",
            "yes",
            "tests/e2e/test_hsdp.py::test_a_killed_run_ends_in_the_same_bits",
        ),
        (
            "sharded states, resumed on another number of workers",
            "but for rounding",
            "tests/e2e/test_torch_shards.py::test_shards_are_resumed_on_any_number_of_workers",
        ),
        (
            "no step is repeated if another worker is left, on CPUs",
            "yes",
            "tests/e2e/test_survivors.py::test_no_step_is_repeated",
        ),
        (
            "a single worker's steps, from copies of its state",
            "no: a step since the copy is taken again, with the same weights at the end",
            "tests/e2e/test_survivors.py::test_a_worker_without_peers_continues_from_its_copy",
        ),
        (
            "mixed precision on one GPU, after a kill (`make gpu`)",
            "yes",
            "tests/gpu/test_training.py::test_a_kill_changes_no_bit",
        ),
    ),
    "Libraries on torch": (
        (
            "Lightning after a kill in mid-epoch, by flag",
            "yes, but for [some](lightning.md#what-a-restart-in-mid-epoch-resumes)",
            "tests/e2e/test_lightning_sweep.py::test_flags_are_what_the_table_says",
        ),
        (
            "Transformers after a kill in mid-epoch, by argument",
            "yes, but for [some](transformers.md#what-a-restart-in-mid-epoch-resumes)",
            "tests/e2e/test_transformers_sweep.py::test_fields_are_what_the_table_says",
        ),
        (
            "Accelerate after a kill",
            "yes",
            "tests/e2e/test_accelerate.py::test_a_killed_run_ends_in_the_same_weights",
        ),
        (
            "DeepSpeed after a kill, with ZeRO",
            "yes",
            "tests/e2e/test_deepspeed.py::test_a_killed_run_ends_in_the_same_weights",
        ),
    ),
    "Keras": (
        (
            "two workers and one process, on TensorFlow",
            "but for rounding, and for [some](keras.md#see-what-is-exact-on-several-workers)",
            "tests/plugin_tf/test_keras_sweep.py::test_two_workers_end_where_one_process_ends",
        ),
        (
            "the same on torch",
            "but for rounding, and for [some](keras.md#see-what-is-exact-on-several-workers)",
            "tests/plugin_torch/test_keras_sweep.py::test_two_workers_end_where_one_process_ends",
        ),
        (
            "the weights after a kill",
            "but for rounding",
            "tests/e2e/test_keras_declarative.py::test_a_killed_run_ends_in_the_same_weights",
        ),
        (
            "no batch of a `fit` is repeated if another worker is left",
            "yes",
            "tests/e2e/test_keras_copies.py::test_a_fit_continues_within_an_epoch",
        ),
    ),
}
"""Heading → what is promised, whether it is exact, and the test."""


def page() -> str:
    """The whole page, as Markdown."""
    return "\n".join([HEAD, *tables()])


def tables() -> Iterator[str]:
    """A table for each heading."""
    for heading, promises in PROMISES.items():
        yield f"## {heading}\n\n| what | exact | shown by |\n|---|---|---|"
        for what, exact, test in promises:
            yield f"| {what} | {exact} | `{test}` |"
        yield ""


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE.relative_to(ROOT)} is written\n")
