"""A run's journal, and what is read from it.

`journal` writes `entries`, many of them as one of the `lines`, and folds each into a `RunHistory`
(`history`). That holds the other folds: `run_facts` (what the run was started with), `overviews`
(its attempts and ranks), `reports` (the reported metrics) and `ledger` (where the time went;
`timeline` also remembers when). Only `progress`, for displays, stands beside it.

Who has a path and no driver reads with `history.read_history`, or follows with `tail`.
"""
