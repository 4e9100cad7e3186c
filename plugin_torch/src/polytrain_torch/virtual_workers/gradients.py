"""The gradients that virtual workers compute: taken from each micro-batch, added up and averaged.

Between hosts a sum takes time in which its ranks only wait. There parameters are divided into
buckets, as in DDP: from the last parameter, which the backward pass reaches first, to the first
one. During the backward pass of this rank's last micro-batch, the sums of the buckets that it has
completed begin, on all ranks in the order of the buckets. A sum is made element by element,
so neither buckets nor times change a bit.

The training function may still change a gradient within the loop whose sum has begun: by a second
backward pass, or by clipping. The last bucket, whose sum begins after the loop, tells all ranks of
that. They sum the bucket again, and begin no sum early from then on.

A sum that begins early is made in memory of its own, since its gradients are still needed. So only
as many begin early as leave a rank with at most log2(C) sets of gradients more than one.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from polytrain_torch.collectives.buckets import buckets
from polytrain_torch.collectives.tree_sums import Node, Tree, Vector, join, leaf, most_values
from polytrain_torch.private import is_unwritten, mark_unwritten
from polytrain_torch.virtual_workers.deterministic import ALIGNED

PerParameter = Sequence[torch.Tensor | None]
"""A gradient for each parameter; None if it has none."""

BeginSum = Callable[[list[Vector]], Callable[[], Vector]]
"""Begins to add the sums of all ranks' subtrees; the function that it returns waits for the sum.

The sum is in as many tensors, which may be those of the first subtree, or in one.
"""

_BUCKET = 4 << 20
"""Bytes of a bucket, at least. Smaller ones begin earlier, and have more messages."""

_BUCKET_AFTERWARDS = 32 << 20
"""The same where sums begin after the loop: what a sum needs beside gradients is for one bucket."""


class Gradients:
    """The gradients of all parameters that `count` virtual workers train.

    In each loop over micro-batches: `begin`, for each micro-batch `take`, `average`. If it
    `overlaps`, sums may begin during the backward pass.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], count: int, begin: BeginSum, *, overlaps: bool
    ) -> None:
        self._begin = begin
        size = _BUCKET if overlaps else _BUCKET_AFTERWARDS
        self._buckets = [_Bucket(bucket, count) for bucket in buckets(parameters, least=size)]
        self._early = self._buckets[: _number_of_early(self._buckets, count) if overlaps else 0]
        """The buckets whose sums may begin early, on any rank."""

        self._overlaps = bool(self._early)
        self._earlier: list[PerParameter] = []
        self._lock = threading.Lock()
        self._last: int | None = None
        """The virtual worker whose backward pass is this rank's last; None at other times."""

        self._missing: list[set[int]] = []
        """Ids of the parameters of each early bucket that the backward pass hasn't reached."""

        self._begun: list[Callable[[], torch.Tensor]] = []
        """Waits for the sums of the first buckets."""

        self._changed: list[bool] = []
        """Whether gradients of these buckets changed after their sums had begun."""

        self._bucket_of = {
            id(each): number
            for number, bucket in enumerate(self._early)
            for each in bucket.parameters
        }
        self._hooks = [
            each.register_post_accumulate_grad_hook(self._reached)
            for bucket in self._early
            for each in bucket.parameters
        ]

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def begin(self) -> None:
        """Take away the gradients so far, to which those of this loop are added."""
        self._earlier = [bucket.taken() for bucket in self._buckets]
        self._begun = []

    def expect_last(self, virtual_worker: int) -> None:
        """Let sums begin in the backward pass of this virtual worker, this rank's last."""
        if self._overlaps:
            self._missing = [{*map(id, bucket.parameters)} for bucket in self._early]
            self._last = virtual_worker

    def expect_none(self) -> None:
        """Begin no more sums until the loop is over."""
        with self._lock:
            self._last = None

    def take(self, virtual_worker: int) -> None:
        """Take the gradients that a virtual worker has computed."""
        self.expect_none()
        count = len(self._begun)
        seen: set[int] = set()
        self._changed = [bucket.compare(virtual_worker) for bucket in self._buckets[:count]]
        for bucket in self._buckets[count:]:
            bucket.take(virtual_worker, seen)

    @torch.no_grad()
    def average(self) -> None:
        """Set the parameters' gradients to the mean over all virtual workers, plus earlier ones."""
        if dist.get_world_size() == 1:
            for bucket, earlier in zip(self._buckets, self._earlier, strict=True):
                bucket.set_own(earlier)
            return
        changed = [*self._changed, *[False] * (len(self._early) - len(self._changed))]
        for number, bucket in [*enumerate(self._buckets)][len(self._begun) :]:
            is_last = bucket is self._buckets[-1]
            # Another rank may have begun this sum early, and have all ranks make it again.
            sums = bucket.sums(changed if is_last else (), keeps=number < len(self._early))
            self._begun.append(self._begin(sums))
        totals = [wait() for wait in self._begun]
        self._begun = []
        # The last bucket's sum says on how many ranks each early one has changed.
        ranks_by_bucket = self._buckets[-1].flags(totals[-1], len(changed)) if changed else []
        for number in (n for n, ranks in enumerate(ranks_by_bucket) if ranks > 0):
            self._overlaps = False
            totals[number] = self._begin(self._buckets[number].sums_again())()
        self._changed = []
        for bucket, earlier in zip(self._buckets, self._earlier, strict=True):
            # One by one: a model's sums take as much memory as its gradients.
            bucket.set(totals.pop(0), earlier)

    def _reached(self, parameter: torch.Tensor) -> None:
        """Begin the sums that are complete. Autograd calls this in each backward pass."""
        with self._lock:
            if self._last is None:
                return
            self._missing[self._bucket_of[id(parameter)]].discard(id(parameter))
            # All ranks begin the buckets in the same order.
            while len(self._begun) < len(self._early) and not self._missing[len(self._begun)]:
                sums = self._early[len(self._begun)].early_sums(self._last)
                if sums is None:
                    self._last = None
                    return
                self._begun.append(self._begin(sums))


class _Bucket:
    """Parameters of one type on one device, whose gradients are added up together."""

    def __init__(self, parameters: Sequence[torch.Tensor], count: int) -> None:
        self.parameters = parameters
        self._count = count
        self._tree: Tree[PerParameter] = Tree(count, _added)
        self._early: PerParameter = ()
        """The gradients of the last micro-batch as they were when the sum began."""

        self._late: tuple[Node, PerParameter] | None = None
        """The same at the end of the micro-batch, which aren't in the tree."""

        self._lacks_gradients = False
        """Whether a parameter has no gradient on this rank, and may have one on others."""

    def taken(self) -> PerParameter:
        """Take the parameters' gradients away, and return them."""
        taken = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return taken

    def take(self, virtual_worker: int, seen: set[int]) -> None:
        """Take the gradients that a virtual worker has computed.

        `seen` has the addresses of gradients that were taken before, and gets those of these.
        """
        self._tree.take(leaf(self._count, virtual_worker), _apart(self._dense(), seen))

    def early_sums(self, virtual_worker: int) -> list[Vector] | None:
        """Return the sums of this rank's subtrees, and leave all gradients as they are.

        The first is a new tensor. None if a change of a gradient couldn't be seen.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        if any(each is None or not mark_unwritten(each) for each in gradients):
            return None
        self._early, self._lacks_gradients = gradients, False
        tree: Tree[Vector] = Tree(self._count, _added_to_joined)
        with torch.no_grad():
            for node, held in self._tree.held:
                tree.take(node, self._vector(held, ()))
            last = join(self._vector(gradients, ()))
            tree.take(leaf(self._count, virtual_worker), [last])
        return tree.taken()

    def compare(self, virtual_worker: int) -> bool:
        """Take the gradients whose sum has begun; return whether they have changed since."""
        late = self._dense()
        self._late = leaf(self._count, virtual_worker), late
        early, self._early = self._early, ()
        return any(
            mine is not its or mine is None or not is_unwritten(mine)
            for mine, its in zip(late, early, strict=True)
        )

    def sums(self, flags: Sequence[bool], *, keeps: bool) -> list[Vector]:
        """Return the sums of this rank's subtrees, with flags that are added up too.

        If it `keeps` the gradients, `sums_again` can follow.
        """
        held = [gradients for _, gradients in reversed(self._tree.held)]
        of_parameters = zip(*held, strict=True)
        self._lacks_gradients = any(all(each is None for each in its) for its in of_parameters)
        if not keeps:
            self._tree.held.clear()
        return [self._vector(gradients, flags) for gradients in held]

    def sums_again(self) -> list[Vector]:
        """Return the sums of this rank's subtrees, with gradients that changed after early sums."""
        if self._late is not None:
            node, late = self._late
            self._tree.take(node, [None if each is None else each.clone() for each in late])
        return self.sums((), keeps=False)

    def flags(self, total: Vector, count: int) -> list[float]:
        """Return the sums of the flags that `sums` got."""
        begin = len(self.parameters)
        return self._split(total)[-1][begin : begin + count].tolist()

    def set_own(self, earlier: PerParameter) -> None:
        """Set the gradients to the mean on this rank, which has all virtual workers; see `set`."""
        [totals] = self._tree.taken()
        self._set(totals, earlier)

    def set(self, total: Vector, earlier: PerParameter) -> None:
        """Set the parameters' gradients to the mean, by the sum over all virtual workers.

        It is added to the gradients before, as in `backward()`.
        """
        self._tree.held.clear()
        self._late = None
        *values, used = self._split(total)
        if self._lacks_gradients:
            # Only then: reading them waits for a GPU to come to the end of its queue.
            are_used = used[: len(values)].tolist()
            pairs = zip(values, are_used, strict=True)
            self._set([value if is_used else None for value, is_used in pairs], earlier)
        else:
            self._set(values, earlier)

    def _set(self, totals: PerParameter, earlier: PerParameter) -> None:
        for parameter, total, before in zip(self.parameters, totals, earlier, strict=True):
            if total is None:
                # As after `backward()` without it: optimizers leave it alone.
                parameter.grad = before
                continue
            mean = _as_gradient(total.div_(self._count), parameter)
            parameter.grad = mean if before is None else before.add_(mean)

    def _split(self, total: Vector) -> Vector:
        """Return the total for each parameter, and what else was added up."""
        if len(total) > 1:
            return total
        sizes = [parameter.numel() for parameter in self.parameters]
        return total[0].split([*sizes, len(total[0]) - sum(sizes)])

    def _dense(self) -> PerParameter:
        taken = self.taken()
        if any(each is not None and each.layout is not torch.strided for each in taken):
            raise TypeError(
                "A parameter has a sparse gradient, which virtual workers don't add. Use "
                "torch.nn.Embedding(…, sparse=False)."
            )
        return taken

    def _vector(self, gradients: PerParameter, flags: Sequence[bool]) -> Vector:
        """Return gradients as a vector whose length is a multiple of the number of ranks.

        After all values it has a 1 for each parameter with a gradient, and the flags.
        """
        values = [
            parameter.new_zeros(parameter.shape) if gradient is None else gradient.contiguous()
            for parameter, gradient in zip(self.parameters, gradients, strict=True)
        ]
        after = [*(float(each is not None) for each in gradients), *map(float, flags)]
        length = sum(each.numel() for each in values) + len(after)
        after += [0.0] * (-length % dist.get_world_size())
        return [*values, torch.tensor(after).to(values[0])]


def _apart(gradients: PerParameter, seen: set[int]) -> PerParameter:
    """Return gradients that share no memory, as a user's backward function may make them.

    `seen` has the addresses of other parameters' gradients, and gets those of these.
    """
    apart: list[torch.Tensor | None] = []
    for each in gradients:
        one = each
        if one is not None:
            # Views may overlap wherever they begin.
            if one.untyped_storage().data_ptr() in seen:
                one = one.clone()
            seen.add(one.untyped_storage().data_ptr())
        apart.append(one)
    return apart


def _added_to_joined(left: Vector, right: Vector) -> Vector:
    """Add a vector to one that is in one tensor, in place."""
    [joined] = left
    for part, theirs in zip(joined.split([each.numel() for each in right]), right, strict=True):
        part.add_(theirs.view(-1))
    return left


def _as_gradient(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return values as autograd makes a gradient: with the parameter's strides, and aligned.

    The last bits of norms depend on both.
    """
    if (
        values.stride() == parameter.stride()
        and values.untyped_storage().nbytes() == values.nbytes
        and values.data_ptr() % ALIGNED == 0
    ):
        return values
    return torch.empty_like(parameter).copy_(values.view(parameter.shape))


def _added(left: PerParameter, right: PerParameter) -> PerParameter:
    """Add gradients, as if those that aren't there were zeros."""
    total: list[torch.Tensor | None] = []
    for mine, theirs in zip(left, right, strict=True):
        if mine is None or theirs is None:
            one = theirs if mine is None else mine
            # 0.0 makes -0.0 positive, as a sum with another rank's zeros does.
            total.append(None if one is None else one.add_(0.0))
        else:
            total.append(mine.add_(theirs))
    return total


def _number_of_early(buckets: Sequence[_Bucket], count: int) -> int:
    """Return how many sums may begin during the backward pass: not the last, nor too many."""
    bytes_of = [sum(each.nbytes for each in bucket.parameters) for bucket in buckets]
    most = math.log2(count) + 1 - most_values(count, dist.get_world_size())
    room = most * sum(bytes_of)
    return sum(begun <= room for begun in accumulate(bytes_of[:-1]))
