"""`polytrain run`: train, from a script, a trainer in a module, or a job as TOML."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polytrain.output.echo import echo, echo_lines
from polytrain.view.cli.found import CAN_RESUME, Refused, WholeNumber
from polytrain.view.run_state import unscored

if TYPE_CHECKING:
    from polytrain.api.trainer import Trainer


@click.command(
    "run",
    # What comes behind WHAT is a script's own.
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "-w",
    "--workers",
    type=WholeNumber(min=0),
    default=1,
    metavar="N",
    help="Worker processes of a script (1).",
)
@click.option("--gpu", is_flag=True, help="Give each worker of a script a GPU.")
@click.option(
    "--max-failures",
    type=WholeNumber(min=-1),
    default=0,
    metavar="N",
    help="Failures after which a script is restarted (0); -1 for any number.",
)
@click.option("--name", help="The run's name; the same name resumes it.")
@click.option("--storage", help="Where a script's run is stored (~/polytrain_results).")
@click.option("-m", "--module", is_flag=True, help="WHAT is a module, as for python -m.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change a TOML job.")
@click.argument("what")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    module: bool,
    settings: tuple[str, ...],
    what: str,
    arguments: tuple[str, ...],
    **of_script: Any,
) -> int:
    """Train. The exit code is 0 if the run is finished, 1 if it or every validation failed, and 75
    if it was stopped. After a signal it is 128 and the signal's number: 130 for Ctrl-C.

    WHAT is one of these:

    \b
    train.py          a script for torchrun; ARGUMENTS are its own
    package.module    the same as a module, with -m
    module:name       a Trainer, or a function that returns one
    job.toml          the arguments of make_trainer
    """
    from polytrain import InvalidJobError, TrainingFailedError
    from polytrain.view.cli.job_file import modules_beside_you
    from polytrain_plugins import RegistryError

    is_file = what.endswith(".toml")
    is_script = _is_script(what, module=module)
    _refuse_options_of_others(of_script, is_script=is_script, is_file=is_file)
    try:
        with modules_beside_you():
            trainer = trainer_of(what, arguments, module=module, settings=settings, **of_script)
            result: Any = trainer.fit()
    except (InvalidJobError, RegistryError) as error:
        raise Refused(str(error)) from error
    except TrainingFailedError as error:
        echo_lines(str(error), err=True)
        return 1
    echo(f"{result.path}: {_in_one_line(result)}")
    if result.validation_failure:
        return 1
    return 0 if result.finished else CAN_RESUME


def _is_script(what: str, *, module: bool) -> bool:
    return module or not (what.endswith(".toml") or ":" in what)


def trainer_of(
    what: str,
    arguments: tuple[str, ...],
    *,
    module: bool,
    settings: tuple[str, ...] = (),
    **of_script: Any,
) -> Trainer:
    """Return the trainer that WHAT names.

    Args:
        of_script: options for a script alone, see `_of_script`.

    Raises:
        InvalidJobError, RegistryError: its arguments are wrong.
        click.ClickException: there is none.
    """
    if _is_script(what, module=module):
        return _of_script(what, arguments, module=module, **of_script)
    if what.endswith(".toml"):
        return _of_file(Path(what), (*settings, *_settings_of(arguments)))
    return _of_module(what)


def _settings_of(arguments: tuple[str, ...]) -> list[str]:
    """The values of `--set` behind the name of a job."""
    settings, rest = [], list(arguments)
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        if option != "--set" or not (equals or rest):
            raise click.UsageError(f"{option}: a job takes --set KEY=VALUE only")
        settings.append(value if equals else rest.pop(0))
    return settings


def _refuse_options_of_others(of_script: Iterable[str], *, is_script: bool, is_file: bool) -> None:
    context = click.get_current_context()
    given = [
        name
        for name in of_script
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    ]
    if given and not is_script:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(
            f"{options}: only for scripts. A trainer or a job has its own scaling_config and "
            "run_config; --set changes a job, as in --set scaling_config.num_workers=4"
        )
    if context.params["settings"] and not is_file:
        raise click.UsageError("--set: only for a job in a .toml file")
    if context.params["arguments"] and not (is_script or is_file):
        from polytrain.record.configuration import shown

        extra = " ".join(shown(context.params["arguments"]))
        raise click.UsageError(f"{extra}: only scripts take arguments; options come before WHAT")


def _of_script(
    what: str,
    arguments: tuple[str, ...],
    *,
    module: bool,
    workers: int = 1,
    gpu: bool = False,
    max_failures: int = 0,
    name: str | None = None,
    storage: str | None = None,
) -> Trainer:
    from polytrain import FailureConfig, RunConfig, ScalingConfig, make_trainer

    options: dict[str, Any] = {"module" if module else "script": what, "args": list(arguments)}
    return make_trainer(
        "torch",
        **options,
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpu),
        run_config=RunConfig(
            name=name,
            storage_path=storage,
            failure_config=FailureConfig(max_failures=max_failures),
        ),
    )


def _of_file(path: Path, settings: tuple[str, ...]) -> Trainer:
    from polytrain import make_trainer
    from polytrain.view.cli.job_file import JobFileError, arguments_of, job_of
    from polytrain_plugins.close_names import did_you_mean_file

    try:
        return make_trainer(**arguments_of(job_of(path.read_text("utf-8-sig"), settings)))
    except FileNotFoundError as error:
        meant = did_you_mean_file(path)
        raise Refused(f"There is no file {path}. {meant}".strip()) from error
    except UnicodeDecodeError as error:
        raise Refused(f"{path} isn't a TOML file: it isn't text in UTF-8.") from error
    except OSError as error:
        raise Refused(f"{path} can't be read: {error.strerror or error}.") from error
    except JobFileError as error:
        raise Refused(f"{path}: {error}") from error


def _of_module(what: str) -> Trainer:
    from polytrain import NotInWorkerError, PolytrainError, Trainer
    from polytrain.config.loop_config import accepts
    from polytrain.functions.users_code import users_traceback
    from polytrain.view.cli.job_file import imported
    from polytrain_plugins.type_names import a_type

    found = imported(what)
    try:
        trainer = found() if inspect.isfunction(found) and accepts(found) else found
    except NotInWorkerError as error:
        raise Refused(f"{what} is a training function. {_NAME_A_TRAINER}") from error
    except PolytrainError:
        raise
    except Exception as error:  # whatever the user's function raises
        raise Refused(f"{what} raises an exception.\n{users_traceback(error)}") from error
    if not isinstance(trainer, Trainer):
        raise Refused(f"{what} is {a_type(trainer)}. {_NAME_A_TRAINER}")
    return trainer


_NAME_A_TRAINER = (
    "Name a Trainer, as make_trainer returns it, or a function without parameters that returns one."
)


def _in_one_line(result: Any) -> str:
    from polytrain.output.metric_texts import metrics_text

    state = "finished" if result.finished else str(result.stopped)
    state += unscored(result.validation_failure)
    return f"{state}. {metrics_text(result.metrics)}".rstrip()
