"""Batch norm over the rows of all ranks."""

from __future__ import annotations

import torch

from polytrain_torch.horovod.basics import size
from polytrain_torch.horovod.reductions import Sum, allreduce
from polytrain_torch.private import ANY_BATCH_NORM


class SyncBatchNorm(ANY_BATCH_NORM):
    """`torch.nn.BatchNorm1d` to `3d` with statistics over all ranks' rows.

    Unlike Horovod's, it also works on CPUs.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"input: it has {input.dim()} dimensions, and needs rows and channels")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise a tensor of shape (rows, channels, …). All ranks call this in training."""
        is_batch = self.training or self.running_mean is None
        if not is_batch or size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        others = [0, *range(2, input.dim())]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        # Compute in float32 or better, also under autocast.
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        ones = values.new_full((1,), values.numel() / values.shape[1])
        sums = allreduce(torch.cat([values.sum(others), ones]), op=Sum)
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centered = values - mean.view(shape)
        variance = allreduce((centered * centered).sum(others), op=Sum) / count
        self._update(mean.detach(), variance.detach(), count)
        output = centered * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(input.dtype)

    @torch.no_grad()
    def _update(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        """Update the running statistics, as torch's batch norm does."""
        if self.running_mean is None or self.running_var is None or not self.training:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = self.momentum
        if factor is None:
            factor = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        unbiased = variance * count / (count - 1).clamp(min=1)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
