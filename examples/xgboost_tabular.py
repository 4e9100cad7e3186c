"""House prices by XGBoost: partitioned Parquet files, categories, early stopping, predictions.

pip install '.[xgboost-cpu]'
python examples/xgboost_tabular.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from polytrain import ScalingConfig, make_trainer

CITIES = ("Bonn", "Köln", "Trier")


def write_houses(directory: Path, *, rows: int, seed: int) -> None:
    """Write one directory of files for each city: `city=Bonn/…`."""
    draws = np.random.default_rng(seed)
    city = draws.integers(len(CITIES), size=rows)
    area = draws.uniform(30, 200, size=rows)
    heating = draws.choice(["gas", "heat pump", None], size=rows)
    price = 1000 * area * (1 + city / 2) + 20_000 * (heating == "heat pump")
    houses = pa.table(
        {
            "city": np.array(CITIES)[city],
            "area": area,
            "heating": heating,
            "price": price + draws.normal(scale=5000, size=rows),
        }
    )
    pq.write_to_dataset(houses, directory, partition_cols=["city"])


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        train, valid = Path(temporary, "train"), Path(temporary, "valid")
        write_houses(train, rows=4000, seed=0)
        write_houses(valid, rows=1000, seed=1)
        result = make_trainer(
            "xgboost",
            params={"objective": "reg:squarederror", "eta": 0.2},
            num_boost_round=300,
            early_stopping_rounds=10,
            label="price",
            datasets={"train": train, "valid": valid},
            scaling_config=ScalingConfig(num_workers=2),
        ).fit()
    rounds = len(result.history)
    print(f"stopped after {rounds} of 300 rounds, RMSE {result.metrics['valid-rmse']:.0f}")
    house = pa.table({"city": ["Köln"], "area": [100.0], "heating": ["gas"]})
    print(f"100 m² in Köln, heated by gas: {result.predict(house)[0]:.0f}")


if __name__ == "__main__":
    main()
