"""A run's journal, and what is read from it.

`journal` writes `entries`, many of them as one of the `lines`, and folds each into a `RunHistory`
(`history`). That holds the other folds: `attempts`, `reports` (the reported metrics) and `ledger`
(where the time went). For trackers and displays there are `run_facts` (what the run was started
with) and `progress`; `view` folds what it alone shows: each rank, and when time was spent.

Who has a path and no driver reads with `history.read_history`, or follows with `tail`.
"""
