"""Search results in order by LightGBM: queries stay whole, on one worker.

pip install '.[lightgbm]'
python examples/lightgbm_ranking.py
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from polytrain import ScalingConfig, make_trainer

PAGES_PER_QUERY = 10


def results(*, queries: int, seed: int) -> pa.Table:
    """Pages that were found for each query, with their relevance from 0 to 3."""
    draws = np.random.default_rng(seed)
    rows = queries * PAGES_PER_QUERY
    matches, clicks, age = draws.uniform(size=(3, rows))
    quality = 2 * matches + clicks - 0.5 * age + draws.normal(scale=0.2, size=rows)
    return pa.table(
        {
            "query": np.repeat(np.arange(queries), PAGES_PER_QUERY),
            "matches": matches,
            "clicks": clicks,
            "age": age,
            "relevance": np.digitize(quality, [0.8, 1.4, 2.0]),
        }
    )


def main() -> None:
    result = make_trainer(
        "lightgbm",
        params={"objective": "lambdarank", "metric": "ndcg", "eval_at": [5], "seed": 0},
        num_boost_round=40,
        label="relevance",
        group="query",
        datasets={"train": results(queries=400, seed=0), "valid": results(queries=100, seed=1)},
        scaling_config=ScalingConfig(num_workers=2),
    ).fit()
    first, last = result.history[0], result.metrics
    print(f"NDCG@5 after one round: {first['valid-ndcg@5']:.3f}")
    print(f"NDCG@5 after {len(result.history)} rounds: {last['valid-ndcg@5']:.3f}")


if __name__ == "__main__":
    main()
