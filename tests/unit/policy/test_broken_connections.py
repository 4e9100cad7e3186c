"""Which exceptions are broken connections between ranks: texts that frameworks have raised.

Each was seen when a peer was killed (SIGKILL), had exited or was stopped, when its connections were
reset (`ss -K`), or when nothing listened at its address.
"""

from __future__ import annotations

from typing import Any

import pytest

from polytrain.data_errors import one_line
from polytrain.errors import Failure, FailureKind
from polytrain.events.attempt import Failed
from polytrain.policy.connections import Origins, is_broken_connection
from polytrain.workers.session.messages import to_event
from polytrain.workers.session.raised_errors import raised_message
from polytrain.workers.session.socket_collective import MODULES


def of(framework: str, plugin: str) -> Origins:
    return Origins(engine=frozenset({plugin, *MODULES}), frameworks=frozenset({framework}))


TORCH = of("torch", "polytrain_torch")
XGBOOST = of("xgboost", "polytrain_xgboost")
LIGHTGBM = of("lightgbm", "polytrain_lightgbm")
TENSORFLOW = of("tensorflow", "polytrain_tf")
USER = "__main__"


def typed(name: str, base: type[Exception] = Exception) -> type[Exception]:
    """An exception type of a module that needn't be installed: "xgboost.core.XGBoostError"."""
    module, _, name = name.rpartition(".")
    made: type[Exception] = type(name, (base,), {"__module__": module})
    return made


def raised(error: BaseException, *modules: str, cause: BaseException | None = None) -> Any:
    """The exception, raised in the last module, which the one before has called, and so on."""

    inner: Any = None
    for module in reversed(modules):
        namespace = {"__name__": module, "inner": inner, "error": error, "cause": cause}
        body = "raise error from cause" if inner is None else "inner()"
        exec(f"def call(): {body}", namespace)
        inner = namespace["call"]
    try:
        inner()
    except BaseException as found:
        return found


XGBOOST_ERROR = typed("xgboost.core.XGBoostError", ValueError)
IN_XGBOOST = (USER, "xgboost.training", "xgboost.core")
DIST_NETWORK_ERROR = typed("torch.distributed.DistNetworkError", RuntimeError)
IN_TORCH = (USER, "torch.distributed.c10d_logger", "torch.distributed.distributed_c10d")
IN_LIGHTGBM = (USER, "polytrain.collective", "polytrain.workers.session.rank_connections")

GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
MORE = " This is typically caused by a remote worker hanging or bugs in the application."
RESULT = "[16:32:09] /workspace/src/collective/result.cc:83: "
BOOTSTRAP = (
    "[comm.cc:220|16:33:19]:\n\n- [comm.cc:220|16:33:19]: Failed to bootstrap the communication "
    "group.\n- [comm.cc:239|16:33:19]: Bootstrap failed.\n"
)

LOST = {
    # torch 2.13.0, gloo
    "torch, killed": (
        TORCH,
        RuntimeError(f"{GLOO}pair.cc:537] Read error [127.0.0.1]:29584: Connection reset by peer."),
        IN_TORCH,
    ),
    "torch, reset": (
        TORCH,
        RuntimeError(
            f"{GLOO}pair.cc:537] Read error [127.0.0.1]:15252: Software caused connection abort."
            + MORE
        ),
        IN_TORCH,
    ),
    "torch, reset while it sends": (
        TORCH,
        RuntimeError(
            f"{GLOO}pair.cc:339] writev [127.0.0.1]:2963: Software caused connection abort"
        ),
        IN_TORCH,
    ),
    "torch, closed": (
        TORCH,
        RuntimeError(f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:4330."),
        IN_TORCH,
    ),
    "torch, in backward()": (
        TORCH,
        RuntimeError(f"{GLOO}pair.cc:537] Read error [127.0.0.1]:7090: Connection reset by peer."),
        (USER, "torch._tensor", "torch.autograd.graph"),
    ),
    # `work.wait()` is native: no frame of torch's.
    "torch, in wait()": (
        TORCH,
        RuntimeError(
            f"{GLOO}pair.cc:537] Read error [127.0.0.1]:27553: Software caused connection abort."
        ),
        (USER,),
    ),
    "torch, stopped": (
        TORCH,
        RuntimeError(
            f"{GLOO}unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"
        ),
        (USER,),
    ),
    # torch 2.13.0, TCPStore
    "torch's store, reset": (TORCH, DIST_NETWORK_ERROR("Connection reset by peer"), (USER,)),
    "torch's store, refused": (
        TORCH,
        DIST_NETWORK_ERROR(
            "The client socket has timed out after 5000ms while trying to connect to (127.0.0.1, "
            "34127)."
        ),
        ("polytrain_torch.engine",),
    ),
    # XGBoost 3.2.0
    "xgboost, killed": (
        XGBOOST,
        XGBOOST_ERROR(
            f"{RESULT}[histogram.h:197|16:32:09]:\n\n- [allreduce.cc:135|16:32:09]: Ring "
            "Allreduce failed.\n- [allreduce.cc:101|16:32:09]: Ring scatter reduce failed, current "
            "iteration:0\n- [socket.h:79|16:32:09]: Poll error condition:Success code:0"
        ),
        IN_XGBOOST,
    ),
    "xgboost, reset": (
        XGBOOST,
        XGBOOST_ERROR(
            f"{RESULT}[histogram.h:197|16:32:21]:\n\n- [allgather.cc:50|16:32:21]: Ring allgather "
            "failed, current iteration:1\n- [socket.h:79|16:32:21]: Poll error condition:Success "
            "code:0"
        ),
        IN_XGBOOST,
    ),
    "xgboost, reset while it leaves": (
        XGBOOST,
        XGBOOST_ERROR(
            f"{RESULT}[comm_group.cc:125|16:32:27]:\n\n- [comm.cc:409|16:32:21]: Failed to "
            "shutdown.\n- [socket.h:79|16:32:21]: recv Connection reset by peer"
        ),
        (USER, "xgboost.collective", "xgboost.core"),
    ),
    "xgboost, refused": (
        XGBOOST,
        XGBOOST_ERROR(
            f"{RESULT}{BOOTSTRAP}- [comm.cc:41|16:33:19]: Failed to connect to the tracker.\n"
            "- [socket.cc:189|16:33:19]: Failed to connect to 127.0.0.1:34025\n- [socket.h:79|"
            "16:33:19]: Poll error condition:Operation now in progress code:115 Operation now in "
            "progress\n- [socket.h:348|16:33:19]: Socket error. Connection refused"
        ),
        ("polytrain_xgboost.engine", "xgboost.collective", "xgboost.core"),
    ),
    # SIGSTOP and SIGCONT interrupt a read that has a time limit.
    "xgboost, stopped while it joins": (
        XGBOOST,
        XGBOOST_ERROR(f"{RESULT}{BOOTSTRAP}- [socket.h:79|16:33:36]: recv Interrupted system call"),
        ("polytrain_xgboost.engine", "xgboost.collective", "xgboost.core"),
    ),
    "xgboost, closed": (
        XGBOOST,
        XGBOOST_ERROR(f"{RESULT}Encountered EOF. The other end is likely closed."),
        IN_XGBOOST,
    ),
    # LightGBM 4.7.0: the collective of polytrain_lightgbm
    "lightgbm, killed": (
        LIGHTGBM,
        ConnectionError("a rank has left the collective"),
        IN_LIGHTGBM,
    ),
    "lightgbm, reset": (
        LIGHTGBM,
        ConnectionResetError(104, "Connection reset by peer"),
        IN_LIGHTGBM,
    ),
    "lightgbm, reset while it sends": (
        LIGHTGBM,
        ConnectionAbortedError(103, "Software caused connection abort"),
        IN_LIGHTGBM,
    ),
    "lightgbm, refused": (
        LIGHTGBM,
        ConnectionRefusedError(111, "Connection refused"),
        ("polytrain.workers.session.rank_connections", "socket"),
    ),
    "lightgbm, its own sockets": (
        LIGHTGBM,
        typed("lightgbm.basic.LightGBMError")(
            "Socket recv error, Connection reset by peer (code: 104)"
        ),
        (USER, "lightgbm.engine", "lightgbm.basic"),
    ),
}

UNAVAILABLE = typed("tensorflow.python.framework.errors_impl.UnavailableError")
IN_TENSORFLOW = (
    "polytrain_tf.summing",
    "tensorflow.python.util.traceback_utils",
    "tensorflow.python.eager.execute",
)
# TensorFlow 2.21.0
LOST |= {
    "tensorflow, killed": (
        TENSORFLOW,
        UNAVAILABLE(
            "Graph execution error:\n\nDetected at node CollectiveReduceV2 defined at (most recent "
            "call last):\n\nCollective ops is aborted by: Error reported from /job:worker/task:1: "
            "The following tasks are unhealthy (stopped sending heartbeats):\n"
            "/job:worker/replica:0/task:1\nThe tasks have crashed. Check the task logs for an "
            "earlier error, or scheduler events (e.g. preemption, eviction) to debug further."
        ),
        IN_TENSORFLOW,
    ),
    "tensorflow, reset": (
        TENSORFLOW,
        UNAVAILABLE(
            "Collective ops is aborted by: recvmsg:Software caused connection abort\nAdditional "
            "GRPC error information from remote target /job:worker/replica:0/task:0 while calling "
            "/tensorflow.WorkerService/CompleteInstance:"
        ),
        IN_TENSORFLOW,
    ),
    "tensorflow, reset before a step": (
        TENSORFLOW,
        UNAVAILABLE(
            "{{function_node __wrapped__CollectiveReduceV2}} Collective ops is aborted by: "
            "recvmsg:Connection reset by peer [Op:CollectiveReduceV2] name:"
        ),
        (USER, "multiprocessing.pool"),
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_a_broken_connection_is_no_error_of_the_user(name: str) -> None:
    origins, error, modules = LOST[name]
    assert is_broken_connection(raised(error, *modules), origins)


HTTP = (USER, "requests.api", "requests.adapters")
RETRIES = "HTTPSConnectionPool(host='api.example.com', port=443): Max retries exceeded with url: /"
OF_THE_USER = {
    # requests 2.34.2, urllib3 2.8.0
    "a web service that refuses": (
        typed("requests.exceptions.ConnectionError", OSError)(
            f"{RETRIES} (Caused by NewConnectionError('Failed to establish a new connection: "
            "[Errno 111] Connection refused'))"
        ),
        HTTP,
    ),
    "a web service that resets": (
        typed("requests.exceptions.ConnectionError", OSError)(
            "('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))"
        ),
        HTTP,
    ),
    "urllib3": (
        typed("urllib3.exceptions.ProtocolError")(
            "('Connection broken: IncompleteRead(3 bytes read)', ConnectionResetError(104, "
            "'Connection reset by peer'))"
        ),
        (USER, "urllib3.connectionpool", "urllib3.response"),
    ),
    "a socket of the user": (ConnectionResetError(104, "Connection reset by peer"), (USER,)),
    "the standard library": (
        ConnectionRefusedError(111, "Connection refused"),
        (USER, "urllib.request", "http.client", "socket"),
    ),
    "a download by the framework": (
        typed("urllib.error.URLError", OSError)("<urlopen error [Errno 111] Connection refused>"),
        (USER, "torch.hub", "urllib.request", "urllib.request"),
    ),
    "a callback within the framework": (
        ConnectionResetError(104, "Connection reset by peer"),
        (USER, "xgboost.training", "xgboost.callback", USER, "redis.connection"),
    ),
    "words of the user": (RuntimeError("upload failed: connection reset by peer"), (USER,)),
    "another error of gloo": (
        RuntimeError(
            "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:446] "
            "op.preamble.length <= op.nbytes. 80 vs 40"
        ),
        IN_TORCH,
    ),
    "another error of torch": (
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x1)"),
        (USER, "torch.nn.modules.linear"),
    ),
    "another error of XGBoost": (
        XGBOOST_ERROR("[12:01:02] /workspace/src/data/data.cc:507: Check failed: valid"),
        IN_XGBOOST,
    ),
    "data that polytrain reads": (
        OSError("When reading information: AWS Error NETWORK_CONNECTION: Connection refused"),
        (USER, "polytrain.data.read.parquet", "polytrain.storage.remote"),
    ),
}


@pytest.mark.parametrize("name", OF_THE_USER)
@pytest.mark.parametrize("backend", [TORCH, XGBOOST, LIGHTGBM, TENSORFLOW])
def test_connections_of_the_user_are_none_of_the_ranks(name: str, backend: Origins) -> None:
    error, modules = OF_THE_USER[name]
    assert not is_broken_connection(raised(error, *modules), backend)


def test_an_exception_counts_like_the_one_that_it_was_raised_from() -> None:
    _, lost, modules = LOST["torch, killed"]
    cause = raised(lost, *modules)
    assert is_broken_connection(raised(RuntimeError("step 7"), USER, cause=cause), TORCH)
    # One that was handled is no cause.
    later = raised(ValueError("no"), USER)
    later.__context__ = cause
    assert not is_broken_connection(later, TORCH)


def test_an_exception_without_a_text_is_the_users_error() -> None:
    class WordlessError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    error = raised(WordlessError(), USER)
    assert not is_broken_connection(error, TORCH)
    assert one_line(error) == "WordlessError"
    assert "WordlessError" in sent(error, connection_lost=False).message


def test_a_backend_says_which_code_its_collective_is() -> None:
    backend = typed("polytrain_mine.backend.Mine")()
    found = Origins.of(backend, {"jaxlib.xla": "pip install jaxlib"})
    assert "polytrain_mine" in found.engine
    assert found.frameworks == {"jaxlib"}
    # A backend in the user's script doesn't make the script an engine.
    assert USER not in Origins.of(typed("__main__.Mine")(), {}).engine


def sent(error: BaseException, *, connection_lost: bool) -> Failure:
    message = raised_message(error, None, connection_lost=connection_lost)
    event = to_event(message, attempt=0, rank=1)
    assert isinstance(event, Failed)
    return event.failure


def test_the_driver_hears_which_kind_it_is() -> None:
    assert sent(ValueError(), connection_lost=False).kind is FailureKind.USER_ERROR
    assert sent(ValueError(), connection_lost=True).kind is FailureKind.CONNECTION_LOST
    assert sent(MemoryError(), connection_lost=False).kind is FailureKind.OUT_OF_MEMORY


def test_an_exception_of_several_texts_is_shown_as_sentences() -> None:
    assert one_line(ValueError("'x' is text.", "In column a")) == (
        "ValueError: 'x' is text. In column a"
    )
    assert one_line(ValueError("a", 1)) == "ValueError: ('a', 1)"
    assert one_line(OSError(2, "No such file")) == "FileNotFoundError: [Errno 2] No such file"
