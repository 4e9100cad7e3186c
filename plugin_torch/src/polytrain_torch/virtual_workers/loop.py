"""The loop over micro-batches within a step, and what it needs to know of an attempt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from polytrain.extension import record_exactness
from polytrain_plugins import VirtualBatch, World, virtual_workers_of
from polytrain_torch.collectives.gathering import gathered
from polytrain_torch.private import compiled_by_shape
from polytrain_torch.randomness import function_seed, seed_place, share_function_seed
from polytrain_torch.row_weights import weighted_loop
from polytrain_torch.virtual_workers.arithmetic import (
    arithmetic,
    check_resumed,
    compare_ranks,
    warn_inexact,
)
from polytrain_torch.virtual_workers.buffers import Buffers
from polytrain_torch.virtual_workers.deterministic import (
    aligned,
    deterministic,
    why_not_deterministic,
)
from polytrain_torch.virtual_workers.gradients import Gradients
from polytrain_torch.virtual_workers.mistakes import (
    LearningRates,
    LoopLosses,
    UnchangedParts,
    checked_averages,
    watched_plateaus,
    watched_ranks,
)
from polytrain_torch.virtual_workers.proof import Proofs
from polytrain_torch.virtual_workers.rank_sums import RankSums

if TYPE_CHECKING:
    from polytrain_torch.collectives.node_group import NodeGroup

_current: VirtualWorkers | None = None


def micro_batches(batch: Any) -> Iterator[Any]:
    """Yield the micro-batches of this worker's virtual workers; any other batch as it is.

        for batch in loader:
            optimizer.zero_grad()
            for x, y in micro_batches(batch):
                loss = loss_function(model(x), y)
                loss.backward()
            optimizer.step()

    With `ScalingConfig(virtual_workers=…)`, prepared models are trained within such a loop. After
    it, gradients are the mean over the global batch, as after `backward()` with DDP: scalers,
    clipping, optimizers and schedulers work on them as usual. On rank 0, variables that the loop
    has set last are virtual worker 0's, at any number of workers.

    Random numbers of torch, NumPy and Python within the loop depend on the seed of the training
    function, the batch's place in the data, and the virtual worker only.

    Args:
        batch: a batch of a prepared data loader or of a shard.

    Raises:
        RuntimeError: another such loop isn't over, or an earlier one was left by `break`.
    """
    if not isinstance(batch, VirtualBatch):
        yield batch
        return
    virtual = _current
    if virtual is None:
        raise RuntimeError("micro_batches(…) works only inside the run that made the batch.")
    yield from virtual.loop(batch)


def current() -> VirtualWorkers | None:
    """Return this attempt's virtual workers; None if it has none."""
    return _current


def refuse_virtual_workers(what: str) -> None:
    """Refuse a user's call or object that can't train with virtual workers.

    Raises:
        ValueError: the run has virtual workers.
    """
    if _current is not None:
        raise ValueError(
            f"{what}: it doesn't train with ScalingConfig(virtual_workers=…), which needs a loop "
            "over micro_batches(…) within each step. Leave virtual_workers out, or write a "
            "training function with prepare_model and micro_batches."
        )


@contextmanager
def virtual_workers(world: World) -> Iterator[None]:
    """Compute with virtual workers in a block of code, if the run has them."""
    global _current
    if world.virtual_workers is None:
        yield
        return
    _current = virtual = VirtualWorkers(world.virtual_workers, world.size, world.me.rank)
    hooks = (
        register_optimizer_step_pre_hook(virtual.check_step),
        register_module_module_registration_hook(_refuse_other_ddp),
    )
    try:
        with (
            deterministic(),
            compiled_by_shape(),
            watched_ranks(virtual.see_ranks_read),
            checked_averages(lambda: virtual.is_in_loop and virtual.trains),
            watched_plateaus(virtual.losses, lambda: virtual.is_in_loop and virtual.trains),
        ):
            yield
        virtual.end()
    finally:
        virtual.close()
        for hook in hooks:
            hook.remove()
        _current = None


def _refuse_other_ddp(model: torch.nn.Module, _: str, __: Any) -> None:
    """Refuse DDP around a model that virtual workers don't train, by whatever library."""
    if isinstance(model, DistributedDataParallel) and not getattr(model, "is_virtual", False):
        refuse_virtual_workers("DistributedDataParallel that prepare_model hasn't made")


class VirtualWorkers:
    """The virtual workers of one attempt, and the gradients that they have computed."""

    def __init__(self, count: int, world_size: int, rank: int) -> None:
        self.count = count
        self.own = virtual_workers_of(count, world_size, rank)
        self.is_uneven = count % world_size > 0
        """Whether some ranks have more virtual workers than others."""

        self.is_in_loop = False
        self.trains = False
        """Whether the loop is one that trains."""

        self.losses = LoopLosses()
        """The losses of the last loop."""

        self._batch_rows: dict[str, int] = {}
        self._resumed_from: Mapping[str, Any] = {}
        self._rows_before: dict[str, int] = {}
        """Data set or loader → the rows of its batches at the checkpoint, until it is cut again."""

        self._world_size = world_size
        self._is_shared = world_size > 1
        self._models: list[torch.nn.Module] = []
        self._gradients: dict[tuple[int, ...], Gradients] = {}
        self._loops: Counter[str] = Counter()
        self._was_left = False
        self._has_shared_seed = False
        self._has_trained = False
        self._not_deterministic: set[str] = set()
        self._read_of_ranks: set[str] = set()
        self._rates = LearningRates()
        self._states = UnchangedParts()
        self._proofs = Proofs()
        self._sums = RankSums(count)

    def add_model(self, model: torch.nn.Module, on_node: NodeGroup | None) -> None:
        """Average the gradients of a model from now on. All ranks add the same ones.

        `on_node` adds tensors on the CPU, if all ranks can share memory.
        """
        self._models.append(model)
        self._proofs.add(model)
        self._sums.add_model(model, on_node)

    def keep(self, parts: Mapping[str, Any]) -> None:
        """Tell of what checkpoints will hold, by name."""
        self._states.add(parts)

    def arithmetic(self) -> dict[str, Any]:
        """Return what results depend on, for a checkpoint; see `resume_from`."""
        return {
            **arithmetic(self.count),
            "workers": self._world_size,
            "batch_rows": {**self._batch_rows},
        }

    def resume_from(self, then: Mapping[str, Any] | None) -> None:
        """Compare with what a checkpoint has of `arithmetic`; None if it had no virtual workers.

        Raises:
            ValueError: the number of virtual workers or of threads is another one.
        """
        self._resumed_from = then or {}
        self._rows_before = {**self._resumed_from.get("batch_rows", {})}
        for why_not in check_resumed(then, arithmetic(self.count)):
            warn_inexact(why_not)

    def cut(self, name: str, rows: int) -> None:
        """Tell into how many rows at most the batches of a data set, or of a loader, are cut."""
        if not torch.is_grad_enabled() or self._batch_rows.get(name) == rows:
            return
        self._batch_rows[name] = rows
        workers = self._resumed_from.get("workers")
        # What changes later is the training function's wish, at any number of workers.
        before = self._rows_before.pop(name, rows)
        if before != rows and workers != self._world_size:
            warn_inexact(
                f"a virtual worker's batches of {name} had {before} rows on {workers} workers, and "
                f"have {rows} on {self._world_size}: batch_size must not depend on the number of "
                "workers"
            )

    def fetched(
        self, batch: VirtualBatch, collate: Callable[[Any], Any] | None = None
    ) -> VirtualBatch:
        """Return a batch, aligned; seed what the training function draws before the loop over it.

        Args:
            collate: makes micro-batches of its contents, and may draw random numbers.
        """
        micro_batches = []
        for micro in batch.micro_batches:
            content = micro.content
            if collate is not None:
                seed_place(f"{function_seed()} {batch.place} collated {micro.virtual_worker}")
                content = collate(content)
            # Now, so that several loops over the batch see each other's changes.
            micro_batches.append(replace(micro, content=aligned(content)))
        seed_place(f"{function_seed()} {batch.place} fetched")
        return replace(batch, micro_batches=tuple(micro_batches))

    def called(self, model: torch.nn.Module, inputs: Any, kwargs: Any) -> None:
        """Tell of a model's call within the loop."""
        if self._is_shared and 0 in self.own:
            self._proofs.called(model, inputs, kwargs)

    def compare_ranks(self) -> None:
        """Compare what the ranks' results depend on. All ranks call this."""
        if self._is_shared and not self._models:
            for why_not in compare_ranks(gathered(arithmetic(self.count))):
                warn_inexact(why_not)

    def check_between_steps(self) -> None:
        """Check that no loop over micro-batches is under way.

        Raises:
            RuntimeError: one is.
        """
        if self.is_in_loop:
            raise RuntimeError(
                "A checkpoint within the loop over micro_batches(…) would be one in the middle of "
                "a step. Report it after the loop."
            )

    def loop(self, batch: VirtualBatch) -> Iterator[Any]:
        """Yield a batch's micro-batches, and average the gradients; see `micro_batches`."""
        self._check_over()
        trains = torch.is_grad_enabled()
        gradients = self._of_parameters() if trains and self._models else None
        if trains and self._models and not self._has_shared_seed:
            self._has_shared_seed = True
            share_function_seed()
        buffers = Buffers(self._models if trains else ())
        if gradients is not None:
            gradients.begin()
            self._rates.begin()
            self.losses.begin()
            self._states.begin(self._models)
        # A step may have several loops over its batch, as for a generator and its critic.
        number = self._number_of(batch)
        self.is_in_loop, self.trains = True, trains
        is_over = False
        try:
            with weighted_loop() as weighted:
                for micro in batch.micro_batches:
                    if micro is not batch.micro_batches[0]:
                        buffers.reset()
                    seed_place(f"{function_seed()} {batch.place} {number} {micro.virtual_worker}")
                    weighted.given(micro.weight, micro.content)
                    if gradients is not None and micro is batch.micro_batches[-1]:
                        gradients.expect_last(micro.virtual_worker)
                    yield micro.content
                    if gradients is not None:
                        self._see_algorithms()
                        self._rates.end_micro_batch()
                        gradients.take(micro.virtual_worker)
            is_over = True
        finally:
            if gradients is not None:
                gradients.expect_none()
            self._rates.end()
            self.is_in_loop = False
            self._was_left = trains and not is_over
        if gradients is not None:
            self._states.end(self._models)
            gradients.average()
        if self._is_shared and trains:
            buffers.send(self._sums.on_node)
            self._proofs.end_loop()
        elif gradients is not None and not self._has_trained:
            # There is no other rank to compare with.
            self._has_trained = True
            record_exactness("")
        seed_place(f"{function_seed()} {batch.place} {number}")

    def end(self) -> None:
        """Tell what hasn't been proven, at the end of an attempt."""
        if self._is_shared and 0 in self.own:
            self._proofs.end_attempt()

    def close(self) -> None:
        """Leave the parameters of all models alone from now on."""
        for gradients in self._gradients.values():
            gradients.close()

    def see_ranks_read(self, name: str) -> None:
        """Warn, once, if the loop calls a function whose result depends on the number of ranks."""
        if self.is_in_loop and torch.is_grad_enabled() and name not in self._read_of_ranks:
            self._read_of_ranks.add(name)
            warn_inexact(
                f"the loop over micro_batches(…) calls {name}, whose result "
                "depends on the number of workers"
            )

    def check_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuse an optimizer's step on gradients that aren't those of the global batch.

        Raises:
            RuntimeError: it is within the loop over micro-batches, or after one that was left.
        """
        if self.is_in_loop and torch.is_grad_enabled():
            raise RuntimeError(
                "An optimizer's step within the loop over micro_batches(…) would train on a part "
                "of the global batch. Step after the loop: there gradients are averaged over all "
                "virtual workers."
            )
        self._check_left()
        self._rates.stepped(optimizer)

    def _see_algorithms(self) -> None:
        """Warn, once each, if the training function has turned off what makes it deterministic."""
        why_not = why_not_deterministic()
        if why_not is not None and why_not not in self._not_deterministic:
            self._not_deterministic.add(why_not)
            warn_inexact(why_not)

    def _check_over(self) -> None:
        if self.is_in_loop:
            raise RuntimeError(
                "A loop over micro_batches(…) began within another one. End the first one before: "
                "its gradients are averaged when it ends."
            )
        self._check_left()

    def _check_left(self) -> None:
        if self._was_left:
            raise RuntimeError(
                "A loop over micro_batches(…) was left before its end, so the gradients of this "
                "global batch aren't complete. Leave out a micro-batch by `continue`, not `break`."
            )

    def _number_of(self, batch: VirtualBatch) -> int:
        """Return how many loops over the batch there were before this one."""
        number = self._loops[batch.place]
        self._loops = Counter({batch.place: number + 1})
        return number

    def _of_parameters(self) -> Gradients:
        trained = {
            id(parameter): parameter
            for model in self._models
            for parameter in model.parameters()
            if parameter.requires_grad
        }
        key = tuple(trained)
        if key not in self._gradients:
            # Some may have been frozen since: free the buffers of the others.
            self.close()
            of_all = Gradients(
                trained.values(),
                self.count,
                self._sums.begin,
                overlaps=self._sums.overlap,
            )
            self._gradients = {key: of_all}
        return self._gradients[key]
