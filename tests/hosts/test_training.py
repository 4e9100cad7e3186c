"""Training on two hosts, to one of which something happens: the model is the same in the end.

Each driver also checks that no checkpoint was committed twice, and that nothing is left of the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from tests.conformance import (
    test_lightgbm,
    test_reference,
    test_tensorflow,
    test_torch,
    test_xgboost,
)

from polytrain.testing import BackendConformance
from polytrain.testing.chaos_cases import UNTOUCHED
from polytrain.testing.chaos_runner import ChaosRun, Files, Work, judged
from polytrain.testing.hosts import Host
from polytrain.testing.network import BOUND_S, RESET, HostCluster, HostFault, cut

# A new cluster of hosts, and the time in which Ray sees that one is lost.
pytestmark = [pytest.mark.only_in_sweep, pytest.mark.timeout(600)]

REFERENCE = test_reference.TestReference
BACKENDS: Mapping[str, type[BackendConformance]] = {
    "xgboost": test_xgboost.TestXGBoost,
    "torch": test_torch.TestTorch,
    "lightgbm": test_lightgbm.TestLightGBM,
    "tensorflow": test_tensorflow.TestTensorFlow,
}


def freeze(host: Host, seconds: float = 10) -> None:
    host.freeze()
    time.sleep(seconds)
    host.thaw()


FAULTS: Mapping[str, HostFault] = {
    "nothing": HostFault(strike=lambda host: None, restarts=(0,)),
    "cut for 3 s": HostFault(strike=cut, restarts=(0,)),
    "frozen for 10 s": HostFault(strike=freeze, restarts=(0,)),
    "connections reset": RESET,
    "killed": HostFault(strike=Host.kill, restarts=(1,)),
    "crashed": HostFault(strike=Host.crash, restarts=(1,)),
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostCluster]:
    cluster = HostCluster(shared=tmp_path_factory.mktemp("shared"))
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Files]:
    """The model of each backend after a run on this machine, without faults."""
    found: dict[str, Files] = {}

    def model(backend: str) -> Files:
        if backend not in found:
            run = ChaosRun(
                subject=BACKENDS[backend].subject(),
                case=UNTOUCHED,
                work="model",
                directory=tmp_path_factory.mktemp(backend),
            )
            outcome = judged(run, expected=None, bound_s=BOUND_S)
            assert outcome.wrong == []
            found[backend] = outcome.model
        return found[backend]

    return model


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_model_is_that_of_a_run_without_faults(
    backend: str, fault: str, cluster: HostCluster, models: Callable[[str], Files]
) -> None:
    subject = BACKENDS[backend].subject()
    assert cluster.wrong_with(FAULTS[fault], subject, expected=models(backend)) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_every_row_is_used_once_per_epoch(fault: str, cluster: HostCluster) -> None:
    subject = REFERENCE.subject()
    assert cluster.wrong_with(FAULTS[fault], subject, work="rows", expected=None) == []


@pytest.mark.parametrize(("backend", "work"), [("reference", "rows"), ("tensorflow", "model")])
def test_a_host_may_stand_still_for_a_minute(tmp_path: Path, backend: str, work: Work) -> None:
    """As a virtual machine does while it moves to another computer: Ray waits for it, too.

    So does TensorFlow, which has heartbeats of its own.
    """
    fault = HostFault(strike=lambda host: freeze(host, 60), restarts=(0,))
    cluster = HostCluster(shared=tmp_path, env={})
    try:
        subject = {**BACKENDS, "reference": REFERENCE}[backend].subject()
        assert cluster.wrong_with(fault, subject, work=work, expected=None) == []
    finally:
        cluster.close()
