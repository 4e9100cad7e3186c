"""Parquet files like HIGGS: 28 features of single precision, and whether there was a signal.

What tells the signal are products and sums of features, covered by noise: trees go on finding
something for hundreds of rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

LABEL = "signal"
_LOW, _HIGH = 21, 7
_NAMES = [f"x{number:02}" for number in range(_LOW + _HIGH)]
_SCHEMA = pa.schema([(LABEL, pa.float32()), *((name, pa.float32()) for name in _NAMES)])
_FILES = 4
_GROUP_ROWS = 1 << 16
_HELD_OUT_ROWS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Higgs:
    """A directory of files to train on, and a file beside it that nobody is trained on."""

    directory: Path
    rows: int

    @property
    def train(self) -> Path:
        """The directory to train on."""
        return self.directory / f"train-{self.rows}"

    @property
    def held_out(self) -> Path:
        """The file to judge a model by."""
        return self.directory / f"held-out-{self._held_out_rows}.parquet"

    def make(self) -> None:
        """Write the files that aren't there yet, which leaves them in the page cache."""
        self.train.mkdir(parents=True, exist_ok=True)
        for number in range(_FILES):
            rows = self.rows // _FILES + (number < self.rows % _FILES)
            _write(self.train / f"part-{number}.parquet", rows, self._group_rows, seed=number + 1)
        _write(self.held_out, self._held_out_rows, self._group_rows, seed=0)

    def auc(self, predict: Any) -> float:
        """The area under the ROC curve, of the rows that nobody is trained on.

        Args:
            predict: from features, float32 of shape `[rows, 28]`, to scores.
        """
        from sklearn.metrics import roc_auc_score

        table = pq.read_table(self.held_out)
        features = np.column_stack([table[name].to_numpy() for name in _NAMES])
        return float(roc_auc_score(table[LABEL].to_numpy(), predict(features)))

    def __str__(self) -> str:
        megabytes = self.rows * len(_SCHEMA) * 4 / 1e6
        return (
            f"{self.rows:,} rows of {len(_NAMES)} features, {megabytes:,.0f} MB: "
            f"{_FILES} files, row groups of {self._group_rows:,} rows"
        )

    @property
    def _held_out_rows(self) -> int:
        return min(self.rows, _HELD_OUT_ROWS)

    @property
    def _group_rows(self) -> int:
        """At least two groups in every file."""
        return min(_GROUP_ROWS, max(1, self.rows // _FILES // 2))


def _write(path: Path, rows: int, group_rows: int, *, seed: int) -> None:
    if path.exists() and pq.read_metadata(path).num_rows == rows:
        return
    random = np.random.default_rng(seed)
    unfinished = path.with_suffix(".unfinished")
    # A dictionary of numbers that are all different would only be larger than the numbers.
    with pq.ParquetWriter(unfinished, _SCHEMA, use_dictionary=False) as writer:
        for first in range(0, rows, group_rows):
            arrays = _events(random, min(group_rows, rows - first))
            writer.write_table(pa.table(arrays, schema=_SCHEMA), row_group_size=group_rows)
    unfinished.rename(path)


def _events(random: np.random.Generator, rows: int) -> list[np.ndarray[Any, Any]]:
    """Label and features, a column each."""
    low = random.standard_normal((_LOW, rows), np.float32)
    # Every third is like a momentum: positive, with a long tail.
    low[::3] = np.exp(0.5 * low[::3])
    momenta, angles, others = low[::3], low[1::3], low[2::3]
    high = np.abs(momenta * angles + others)
    high += 0.3 * random.standard_normal(high.shape, np.float32)
    score = (
        np.tanh(high[:4]).sum(axis=0)
        - 0.8 * np.abs(momenta[4:] - momenta[:3]).sum(axis=0)
        + angles[0] * others[1]
        + 0.5 * momenta[2] * angles[3] * others[4]
    )
    chance = 1 / (1 + np.exp(-(score - 0.3)))
    signal = (random.random(rows) < chance).astype(np.float32)
    return [signal, *low, *high]
