"""Training state in checkpoints: models, optimizers, schedulers, random states.

If rank 0 writes, it writes everything. If every rank writes, sharded parts (FSDP2) stay sharded, in
the format of `torch.distributed.checkpoint`, and any number of ranks can load them. In both cases,
state that differs by rank is restored to its rank.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from polytrain import Checkpoint, ValidationTaskConfig, get_checkpoint, get_context
from polytrain.extension import scratch_directory, survivor
from polytrain_plugins.type_names import a_type
from polytrain_torch.checkpoints.optimizer_types import (
    have_same_types,
    numbered_states,
    restore_types,
)
from polytrain_torch.checkpoints.parts import refuse_options, report_part
from polytrain_torch.checkpoints.rank_parts import (
    Differences,
    comparable,
    differences,
    keep_metric,
    own_states,
    refuse_other_ranks,
    save_own,
    states_of_all,
)
from polytrain_torch.checkpoints.rank_states import save_rank_states
from polytrain_torch.checkpoints.read_back import (
    copy_without_values,
    has_loaded,
    is_first_save,
    state_without_values,
    try_loading,
    warn_of_hooks,
    whole_copies_without_values,
    with_whole_shards,
)
from polytrain_torch.checkpoints.safe_serialization import refuse_unsafe
from polytrain_torch.checkpoints.sharded import SafeReader
from polytrain_torch.checkpoints.sharded_parts import (
    IN_FULL,
    ShardedParts,
    State,
    beside_shards,
    fsdp_modules,
    is_consolidated,
    is_sharded,
    names_parameters,
)
from polytrain_torch.checkpoints.state_digests import check_replicas, hold
from polytrain_torch.checkpoints.state_files import read_model, read_state, write_state
from polytrain_torch.collectives.call_agreement import agree_on_call
from polytrain_torch.collectives.gathering import gathered
from polytrain_torch.models.parallel import unwrapped
from polytrain_torch.models.shared_tensors import see_model
from polytrain_torch.randomness import restore_random_states
from polytrain_torch.survivors import keeper
from polytrain_torch.survivors.keeper import Keeper
from polytrain_torch.virtual_workers import current
from polytrain_torch.virtual_workers.arithmetic import warn_inexact

logger = logging.getLogger(__name__)

_MERGES = "load_state_dicts"
_KINDS = ("parts", "beside", "progress")


class TrainingState:
    """Saves and restores the objects of a training function in its checkpoints.

        state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler)
        done = state.restore()
        for epoch in range(done.get("epoch", 0), 10):
            ...
            state.report({"loss": loss}, epoch=epoch + 1)

    Every rank's random states of torch, NumPy and Python are saved too. New ranks get fresh random
    streams. Parts and progress that differ by rank are restored to their rank. On another number
    of workers, such a part must have a method `load_state_dicts(states)`, which gets all ranks'
    states in the order of ranks.

    Args:
        parts: objects with `state_dict` and `load_state_dict`, under any names, or torch's
            generators. If rank 0 writes, the weights of the part "model" are in `model.pt`.

    Raises:
        TypeError: a part has no state.
        ValueError: an optimizer was made before the model was sharded, or trains sharded
            parameters that aren't all in one part.
    """

    _compares_ranks = True
    """Whether states that differ by rank are stored for each rank."""

    def __init__(self, **parts: Any) -> None:
        for name, part in parts.items():
            if isinstance(part, torch.Generator):
                parts[name] = part = _OfGenerator(part)
            keep_metric(part)
            if isinstance(part, torch.nn.Module):
                see_model(part)
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise TypeError(
                    f"{name}: {a_type(part)} has no state_dict and load_state_dict. Pass "
                    f"plain data to report instead: state.report(…, {name}=…)."
                )
        self._parts = parts
        self._reshard()
        self._sharded.check_optimizers()
        virtual = current()
        if virtual is not None:
            virtual.keep(parts)
        hold(self)

    @property
    def parts(self) -> Mapping[str, Any]:
        """The objects whose state is saved, by name."""
        return self._parts

    @property
    def _sharded(self) -> ShardedParts:
        return ShardedParts(self._parts)

    @property
    def progress(self) -> State:
        """The `progress` in the checkpoint from which the attempt resumes; empty without one.

        Read it before `restore` to rebuild the parts as they were saved, for example with the
        layers that training had unfrozen, or the parameter groups that it had added.
        """
        checkpoint = get_checkpoint()
        if checkpoint is None:
            return {}
        directory = Path(checkpoint.path)
        saved = read_state(directory)
        found: Differences = saved["found"]
        refuse_other_ranks(_of_progress(found), found)
        own = own_states({"progress": saved["progress"]}, found, directory)
        return own["progress"]

    def restore(self, checkpoint: Checkpoint | None = None) -> State:
        """Load the checkpoint from which the attempt resumes. All ranks call this before training.

        Args:
            checkpoint: load this one instead.

        Returns:
            The `progress` that was passed to `report`; empty without a checkpoint, and with one
            of a step before the first report, which another rank has kept.

        Raises:
            KeyError: the checkpoint lacks a part.
            ValueError: an optimizer has other parameter groups than the saved one, or the
                checkpoint has per-rank state of another number of workers; or virtual workers or
                their threads were others.
        """
        checkpoint = checkpoint or get_checkpoint()
        self._reshard()
        if checkpoint is None:
            self._keep({})
            return {}
        directory = Path(checkpoint.path)
        saved = self._read(directory)
        has_loaded(self)
        virtual = current()
        if virtual is not None:
            virtual.resume_from(saved.get("arithmetic"))
            if saved["lacks_gradients"]:
                warn_inexact(
                    "a checkpoint was made between backward() and the optimizer's step, and lacks "
                    "the gradients so far"
                )
        own = {name: unwrapped(part) for name, part in self._parts.items()}
        has_types = have_same_types(own, saved["parts"])
        for name, state in saved["parts"].items():
            if name in self._parts:
                self._expect_groups(name, state, saved["progress"])
                self._load(name, state)
                if has_types and isinstance(own[name], torch.optim.Optimizer):
                    restore_types(
                        own[name],
                        self._sharded.named_states(name, state)
                        if names_parameters(state)
                        else numbered_states(own[name], state),
                    )
        sharded = [name for name in saved["sharded"] if name in self._parts]
        for name, state in self._sharded.saved_groups(sharded, directory).items():
            self._expect_groups(name, state, saved["progress"])
        self._sharded.load_all(sharded, directory)
        for name, state in saved["beside"].items():
            if name in self._parts:
                unwrapped(self._parts[name]).load_state_dict(state, strict=False)
        for name, states in saved["of_all"].items():
            unwrapped(self._parts[name]).load_state_dicts(states)
        restore_random_states(directory)
        progress: State = saved["progress"]
        self._keep(progress)
        return progress

    def _reshard(self) -> None:
        """Take back what an evaluation may have gathered. All ranks call this."""
        for part in self._parts.values():
            for module in fsdp_modules(part):
                module.reshard()

    def _keep(self, progress: State) -> None:
        # The training function draws from the generator inside of such a part.
        inside = [each.generator for each in self._parts.values() if isinstance(each, _OfGenerator)]
        keeper.start(Keeper(self._parts, progress, around=inside))

    def _read(self, directory: Path) -> State:
        """Read a checkpoint, except sharded parts and random states."""
        saved: State = read_state(directory)
        read_model(directory, saved)
        saved["of_all"] = {}
        found = saved["found"]
        if found["ranks"] != dist.get_world_size():
            self._merge(saved, directory)
        saved |= own_states({kind: saved[kind] for kind in _KINDS}, found, directory)
        self._compare({*saved["parts"], *saved["of_all"], *saved["sharded"]})
        return saved

    def _merge(self, saved: State, directory: Path) -> None:
        """Move states of parts that can merge all ranks' states to "of_all".

        Raises:
            ValueError: other states differ by rank.
        """
        found: Differences = saved["found"]
        names = {
            kind: [name for name in found["names"].get(kind, ()) if name in self._parts]
            for kind in ("parts", "beside")
        }
        merged = [name for name in names["parts"] if hasattr(unwrapped(self._parts[name]), _MERGES)]
        refused = {*names["parts"], *names["beside"]}.difference(merged)
        refuse_other_ranks([*sorted(refused), *_of_progress(found)], found)
        for name in merged:
            first = saved["parts"].pop(name, None)
            saved["of_all"][name] = states_of_all("parts", name, first, found, directory)

    def _read_back(self, directory: Path, sharded: Mapping[str, State]) -> None:
        """Read the first checkpoint as a restart would, and load it into copies of the parts.

        The directory may have only this rank's shards, whose states are in `sharded`.
        """
        saved = self._read(directory)
        if sharded:
            SafeReader(directory).read_metadata()
        parts = {name: unwrapped(part) for name, part in self._parts.items()}
        of_shards = whole_copies_without_values(
            {name: part for name, part in parts.items() if is_sharded(part)}
        )
        trial = copy(self)
        for name, state in {**saved["parts"], **sharded}.items():
            others = [part for other, part in parts.items() if other != name]
            if is_sharded(parts[name]):
                copies = of_shards
                load = partial(
                    ShardedParts({**parts, **copies}).load, name, state_without_values(state)
                )
            else:
                copied = copy_without_values(parts[name], keeping=others)
                copies = {} if copied is None else {name: copied}
                load = partial(trial._load, name, with_whole_shards(state))
            if name in copies:
                trial._parts = {**parts, **copies}
                # To load shards into an optimizer without a state, torch takes a step.
                with keeper.unnoted_steps():
                    try_loading(name, load)

    def save(self, directory: str | Path, **progress: Any) -> None:
        """Write all parts into a directory of this rank. All ranks call this.

        Args:
            directory: an empty directory. Ranks that don't write checkpoints leave it empty.
            progress: plain data that `restore` returns.

        Raises:
            TypeError: a value isn't plain data, and couldn't be loaded safely.
            CheckpointError: a part's state can't be loaded. Only the first save tries that.
            ReplicasDifferError: `RunConfig.digests` is set, and what DDP trains differs between
                ranks.
            RuntimeError: there are virtual workers, and a loop over their micro-batches isn't over,
                or models or optimizers differ between ranks.
        """
        self._write(Path(directory), progress)

    def _write(self, directory: Path, progress: State) -> None:
        virtual = current()
        if virtual is not None:
            virtual.check_between_steps()
        agree_on_call("TrainingState.save")
        self._reshard()
        by_all = get_context().every_rank_writes()
        sharded = {name for name, part in self._parts.items() if by_all and is_sharded(part)}
        whole = {name: self._state(name) for name in self._parts if name not in sharded}
        states = {name: self._sharded.state(name) for name in sharded}
        if sharded:
            refuse_unsafe(states)
            dcp.save(states, checkpoint_id=directory)
        compared: dict[str, dict[str, Any]] = {
            "parts": {
                name: comparable(self._parts[name], state)
                for name, state in whole.items()
                if not self._is_gathered(name)
            },
            "beside": {
                name: beside_shards(part)
                for name, part in self._parts.items()
                if isinstance(part, torch.nn.Module) and is_sharded(part)
            },
            "progress": progress,
        }
        equal = [] if virtual is None else [*filter(self._is_trained, self._parts)]
        found = differences(compared if self._compares_ranks else {}, equal=equal)
        check_replicas(self._parts, found)
        _agree_on_copies()
        save_own({**compared, "parts": whole}, found, directory)
        save_rank_states(directory)
        if dist.get_rank() != 0:
            return
        beside, keeps = found["names"].get("beside", ()), keeper.keeper()
        write_state(
            directory,
            whole,
            progress=progress,
            found=found,
            sharded=sharded,
            beside={name: compared["beside"][name] for name in beside},
            lacks_gradients=keeps is not None and keeps.lacks_gradients(),
        )
        if is_first_save(self):
            warn_of_hooks(self._parts.values())
            self._read_back(directory, states)

    def report(
        self,
        metrics: Mapping[str, Any],
        *,
        validation: bool | ValidationTaskConfig = False,
        **progress: Any,
    ) -> None:
        """Report metrics with a checkpoint of all parts; see `polytrain.report`. All ranks call it.

        Args:
            metrics: as for `polytrain.report`.
            validation: as for `polytrain.report`: whether to validate the checkpoint.
            progress: plain data that `restore` returns, such as the next epoch's number.

        Raises:
            TypeError: another option of `polytrain.report` is passed.
        """
        refuse_options(progress)
        keeps = keeper.keeper()
        if keeps is not None:
            keeps.at_report(metrics, progress, validation)
        # Not in the system's directory: report may end this process, and it would stay.
        with tempfile.TemporaryDirectory(dir=scratch_directory(), prefix="state-") as directory:
            self._write(Path(directory), progress)
            writes = dist.get_rank() == 0 or get_context().every_rank_writes()
            report_part(metrics, Path(directory) if writes else None, validation)

    def _is_trained(self, name: str) -> bool:
        part = self._parts[name]
        is_model = isinstance(part, torch.nn.Module) and next(part.parameters(), None) is not None
        return is_model or isinstance(part, torch.optim.Optimizer)

    def _is_gathered(self, name: str) -> bool:
        """Whether only rank 0 gets a part's whole state."""
        part = self._parts[name]
        return is_sharded(part) or is_consolidated(part)

    def _state(self, name: str) -> State:
        part = self._parts[name]
        if is_sharded(part):
            return self._sharded.state(name, IN_FULL)
        if is_consolidated(part):
            part.consolidate_state_dict(to=0)
            if dist.get_rank() != 0:
                return {}
        state: State = unwrapped(part).state_dict()
        return state

    def _load(self, name: str, state: State) -> None:
        part = self._parts[name]
        if is_sharded(part) and "param_groups" in state and not names_parameters(state):
            state = self._sharded.by_name(name, state)
        if is_sharded(part) or names_parameters(state):
            self._sharded.load(name, state, IN_FULL)
        else:
            unwrapped(part).load_state_dict(state)

    def _expect_groups(self, name: str, state: State, progress: State) -> None:
        """Raise an error if an optimizer has other parameter groups than the saved one.

        torch's own error neither names them nor helps with groups that training adds.
        """
        part = self._parts[name]
        if not isinstance(part, torch.optim.Optimizer) or "param_groups" not in state:
            return
        saved, mine = (
            [len(group["params"]) for group in groups]
            for groups in (state["param_groups"], part.param_groups)
        )
        if saved != mine:
            raise ValueError(
                f"{name}: the checkpoint has {_groups(saved)}, and the optimizer {_groups(mine)}. "
                "Give it the same ones before restore(). Where training adds some "
                "(add_param_group), state.progress says before restore() how far it was: "
                f"{progress!r}."
            )

    def _compare(self, saved: set[str]) -> None:
        missing, more = self._parts.keys() - saved, saved - self._parts.keys()
        if missing:
            raise KeyError(
                f"The checkpoint has no {', '.join(sorted(missing))}; it has "
                f"{', '.join(sorted(saved)) or 'nothing'}. Pass TrainingState the same parts as "
                "before, under the same names."
            )
        if more:
            names = ", ".join(sorted(more))
            logger.warning("Not restored, because no part has the name: %s", names)


class _OfGenerator:
    """Makes a generator a part, with `state_dict` and `load_state_dict`."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> State:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: State) -> None:
        self.generator.set_state(state["state"])


def _agree_on_copies() -> None:
    """Have all ranks copy their parts as seldom as the slowest of them wants. All call this."""
    copies = survivor().copies
    if copies is not None and not copies.is_alone and copies.pace.every == "auto":
        copies.pace.agree(gathered(copies.pace.wanted))


def _of_progress(found: Differences) -> list[str]:
    return [f"progress {name!r}" for name in found["names"].get("progress", ())]


def _groups(sizes: list[int]) -> str:
    number = "1 parameter group" if len(sizes) == 1 else f"{len(sizes)} parameter groups"
    return f"{number} (parameters: {', '.join(map(str, sizes))})"
