"""What training has come to, in checkpoints: models, optimizers and the like, random numbers.

Where rank 0 writes, it writes everything. Where every rank does, what is sharded over the ranks
(FSDP2) stays so, as `torch.distributed.checkpoint` has it, and any number of ranks can load it.
"""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from polytrain import Checkpoint, get_checkpoint, get_context, report
from polytrain.extension import scratch_directory
from polytrain_torch.engine import MODEL_FILE, unwrapped
from polytrain_torch.randomness import restore_random_states, save_random_states
from polytrain_torch.safe_serialization import loaded, save_safely

logger = logging.getLogger(__name__)

_STATE_FILE = "state.pt"
_IN_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)

State = dict[str, Any]


class TrainingState:
    """The parts of a training function that its checkpoints hold.

        state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler)
        done = state.restore()
        for epoch in range(done.get("epoch", 0), 10):
            ...
            state.report({"loss": loss}, epoch=epoch + 1)

    With them travel the random numbers of torch, NumPy and Python, those of every rank; a rank that
    there wasn't before draws others than all that were.

    Args:
        parts: by names of one's own, whatever has `state_dict` and `load_state_dict`. Where rank 0
            writes, the weights of the one called "model" are in `model.pt`, as other backends'.

    Raises:
        TypeError: if a part has no state.
        ValueError: if an optimizer was made before the model was sharded.
    """

    def __init__(self, **parts: Any) -> None:
        for name, part in parts.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise TypeError(
                    f"{name}: a {type(part).__name__} has no state_dict and load_state_dict. What "
                    f"is plain data goes with report: state.report(…, {name}=…)."
                )
        self._parts = parts
        self._refuse_idle_optimizers()

    def restore(self, checkpoint: Checkpoint | None = None) -> State:
        """Load what the attempt resumes from. All ranks call this, before they train.

        Args:
            checkpoint: another one than that.

        Returns:
            What `report` was given besides the metrics. Nothing, if training starts.

        Raises:
            KeyError: if the checkpoint lacks a part.
        """
        checkpoint = checkpoint or get_checkpoint()
        if checkpoint is None:
            return {}
        directory = Path(checkpoint.path)
        saved = loaded(directory / _STATE_FILE)
        if "model" in saved["apart"]:
            saved["parts"]["model"] = loaded(directory / MODEL_FILE)
        self._compare({*saved["parts"], *saved["sharded"]})
        for name, state in saved["parts"].items():
            if name in self._parts:
                self._load(name, state)
        self._load_sharded([name for name in saved["sharded"] if name in self._parts], directory)
        restore_random_states(directory)
        progress: State = saved["progress"]
        return progress

    def save(self, directory: str | Path, **progress: Any) -> None:
        """Write it all into a directory of this rank's. All ranks call this.

        Args:
            directory: which is there, and empty. On ranks that don't write checkpoints it stays so.
            progress: plain data for `restore` to give back.

        Raises:
            TypeError: if something is no plain data, and couldn't be loaded safely.
        """
        directory = Path(directory)
        by_all = get_context().every_rank_writes()
        sharded = {name for name, part in self._parts.items() if by_all and _is_sharded(part)}
        whole = {name: self._state(name) for name in self._parts if name not in sharded}
        if sharded:
            states = {name: self._state_by_names(name) for name in sharded}
            dcp.save(states, checkpoint_id=directory)
        save_random_states(directory)
        if dist.get_rank() != 0:
            return
        apart = {name for name in whole if name == "model"}
        for name in apart:
            torch.save(whole.pop(name), directory / MODEL_FILE)
        save_safely(
            {
                "parts": whole,
                "apart": sorted(apart),
                "sharded": sorted(sharded),
                "progress": progress,
            },
            directory / _STATE_FILE,
        )

    def report(self, metrics: Mapping[str, Any], **progress: Any) -> None:
        """Report metrics with a checkpoint of all parts; see `polytrain.report`. All ranks call it.

        Args:
            metrics: as for `polytrain.report`.
            progress: plain data for `restore` to give back, such as the next epoch's number.
        """
        # Not in the system's: report doesn't return if this process is to end.
        with tempfile.TemporaryDirectory(dir=scratch_directory(), prefix="state-") as directory:
            self.save(directory, **progress)
            writes = dist.get_rank() == 0 or get_context().every_rank_writes()
            report(metrics, checkpoint=Checkpoint.from_directory(directory) if writes else None)

    def _state(self, name: str) -> State:
        part = self._parts[name]
        if _is_sharded(part):
            return self._state_by_names(name, _IN_FULL)
        state: State = unwrapped(part).state_dict()
        return state

    def _load(self, name: str, state: State) -> None:
        part = self._parts[name]
        if _is_sharded(part) and "param_groups" in state and not _names_parameters(state):
            state = self._by_name(name, state)
        if _is_sharded(part) or _names_parameters(state):
            self._load_by_names(name, state, _IN_FULL)
        else:
            unwrapped(part).load_state_dict(state)

    def _load_sharded(self, names: list[str], directory: Path) -> None:
        if not names:
            return
        # Read into what is there now, which may be sharded otherwise.
        states = {name: self._state_by_names(name) for name in names}
        dcp.load(states, checkpoint_id=directory)
        for name, state in states.items():
            self._load_by_names(name, state)

    def _state_by_names(self, name: str, options: StateDictOptions | None = None) -> State:
        part = self._parts[name]
        state: State
        if isinstance(part, torch.nn.Module):
            state = get_model_state_dict(part, options=options)
        else:
            state = get_optimizer_state_dict(self._trained_by(name), part, options=options)
        return state

    def _load_by_names(
        self, name: str, state: State, options: StateDictOptions | None = None
    ) -> None:
        part = self._parts[name]
        if isinstance(part, torch.nn.Module):
            set_model_state_dict(part, state, options=options)
        else:
            set_optimizer_state_dict(self._trained_by(name), part, state, options=options)

    def _by_name(self, optimizer: str, state: State) -> State:
        """An optimizer's state that numbers the parameters, with their names in the model."""
        model = unwrapped(self._trained_by(optimizer))
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups, by_name = [], {}
        for group, mine in zip(
            state["param_groups"], self._parts[optimizer].param_groups, strict=True
        ):
            numbered = dict(zip(group["params"], mine["params"], strict=True))
            named = {number: names[id(parameter)] for number, parameter in numbered.items()}
            groups.append({**group, "params": list(named.values())})
            by_name |= {
                named[number]: state["state"][number]
                for number in named
                if number in state["state"]
            }
        return {"state": by_name, "param_groups": groups}

    def _trained_by(self, optimizer: str) -> torch.nn.Module:
        """The model whose parameters are an optimizer's: by their names ranks tell shards apart."""
        mine = {id(parameter) for parameter in _parameters(self._parts[optimizer])}
        for part in self._parts.values():
            if isinstance(part, torch.nn.Module) and any(
                id(parameter) in mine for parameter in part.parameters()
            ):
                return part
        raise KeyError(
            f"The optimizer {optimizer!r} trains sharded parameters of a model that is no part of "
            "this. Pass the model as well: TrainingState(model=model, …)."
        )

    def _refuse_idle_optimizers(self) -> None:
        """Sharding replaces parameters: an optimizer of those before trains nothing, silently."""
        models = [part for part in self._parts.values() if isinstance(part, torch.nn.Module)]
        replaced = [shapes for model in models if _is_sharded(model) for shapes in _shapes(model)]
        there = {id(parameter) for model in models for parameter in model.parameters()}
        for name, part in self._parts.items():
            # It may as well train what is no part, beside a sharded model.
            if (
                isinstance(part, torch.optim.Optimizer)
                and not _is_sharded(part)
                and there.isdisjoint(map(id, _parameters(part)))
                and Counter(each.shape for each in _parameters(part)) in replaced
            ):
                raise ValueError(
                    f"{name}: it trains no parameter of the model, for sharding has replaced those "
                    "that it was made with. Make it after prepare_model."
                )

    def _compare(self, saved: set[str]) -> None:
        missing, more = self._parts.keys() - saved, saved - self._parts.keys()
        if missing:
            raise KeyError(
                f"The checkpoint has no {', '.join(sorted(missing))}; it has "
                f"{', '.join(sorted(saved)) or 'nothing'}. Pass TrainingState the parts that it "
                "had, under the names that they had."
            )
        if more:
            logger.warning("Not restored, for no part has the name: %s", ", ".join(sorted(more)))


def _is_sharded(part: Any) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in _parameters(part))


def _shapes(model: torch.nn.Module) -> list[Counter[torch.Size]]:
    """Those of the whole parameters that an optimizer is made with: all, or what is trained."""
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return [Counter(each.shape for each in some) for some in (parameters, trained)]


def _parameters(part: Any) -> Iterator[Any]:
    if isinstance(part, torch.nn.Module):
        yield from part.parameters()
    elif isinstance(part, torch.optim.Optimizer):
        for group in part.param_groups:
            yield from group["params"]


def _names_parameters(state: State) -> bool:
    """Whether it is an optimizer's state that was put together: others number the parameters."""
    groups = state.get("param_groups")
    return bool(groups) and any(isinstance(each, str) for each in groups[0].get("params", ()))
