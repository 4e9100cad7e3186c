"""Runs in a worker process: the session of a training function, and its messages.

`worker_process` reads a `job`, joins the other ranks and makes a `WorkerSession` (`session`), which
the functions of `worker_api` call. With a report it sends `metrics`, and gives `checkpoint_files`
to the `checkpoint_uploader`; `data_cursors` say which rows have been used until then. Everything
that leaves the process is one of the `messages`. `survivor` and `copies` keep the state of the
training for a loss. `socket_collective` and `rank_connections` are for backends without a
collective of their own.
"""
