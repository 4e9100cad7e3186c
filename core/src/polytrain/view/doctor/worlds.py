"""Checks of backends: two ranks that join, and add up a sum."""

from __future__ import annotations

import tempfile

import polytrain
from polytrain.api.backend_checks import missing_modules
from polytrain.api.trainer import make_trainer
from polytrain.config.configs import RunConfig, ScalingConfig
from polytrain.errors import TrainingFailedError
from polytrain.view.doctor.finding import CheckFailed
from polytrain_plugins import InvalidJobError, load_backend

_RANKS = 2


def backend(name: str) -> str:
    """Train nothing on two ranks of a backend. The core proves the collective by a sum of its own.

    Raises:
        CheckFailed: the backend can't be imported, or its ranks don't join.
    """
    cls = load_backend(name)
    missing = missing_modules(cls.requires)
    if missing:
        raise CheckFailed(f"{', '.join(missing)} isn't installed", "; ".join(missing.values()))
    with tempfile.TemporaryDirectory(prefix="polytrain-doctor-") as directory:
        try:
            result = make_trainer(
                name,
                _ranks,
                scaling_config=ScalingConfig(
                    num_workers=_RANKS,
                    cluster="local",
                    # A machine with one CPU has room for both.
                    resources_per_worker={"CPU": 0.01},
                ),
                run_config=RunConfig(name=name, storage_path=directory, progress=False),
            ).fit()
        except InvalidJobError as error:
            what = "; ".join(f"{each.field}: {each.what}" for each in error.problems)
            raise CheckFailed(what, "; ".join(each.remedy for each in error.problems)) from error
        except TrainingFailedError as error:
            raise CheckFailed(f"{error.failures[0]}", "Train with it, and read the log") from error
    if result.return_values != tuple(range(_RANKS)):
        raise CheckFailed(f"ranks returned {result.return_values}", "Report this as a bug")
    return f"{_RANKS} ranks joined within {result.ledger.wall_s:.1f} s"


def _ranks() -> int:
    return polytrain.get_context().get_world_rank()
