"""The optimizer step that stepstack computes, written the plain way: one file, only torch and torch.distributed.

A model is trained data-parallel on the ranks of the default process group. Its parameters lie in flat buckets, every
rank owns one equal shard of each bucket, and only the owner of a shard keeps optimizer states for it (ZeRO stage 1,
Rajbhandari et al. 2020). The states are in fp32, with a master copy of the weights where the model is in bf16 or fp16;
the update is AdamW (Loshchilov & Hutter 2019, algorithm 2).

A step has six phases, which are the six methods that `ReferenceStep.__call__` calls in turn:

1. `reduce_gradients`: each rank gets the mean of the gradients of its own shards.
2. `gradient_norm`: the norm of the whole gradient, from the sum of squares over all shards.
3. `decide`: skip the step if the norm is not finite, else clip. All ranks decide alike, since all have the same norm.
4. `update`: AdamW on this rank's shards.
5. `gather_parameters`: each rank gets the updated shards of all others.
6. `update_loss_scale`: smaller after a skipped step, larger after many that were not.

Nothing here is fast: the reduction waits for the whole backward, the norm is read by the host, the gradients are
multiplied before they are used, and every line of AdamW is a pass over memory.
"""

import math

import torch
import torch.distributed as dist


class Bucket:
    """Some parameters, one behind the other in a flat buffer, and this rank's shard of that buffer.

    The buffer is padded with zeros to a multiple of the number of ranks. The parameters become views of it.
    """

    def __init__(self, params, ranks, rank):
        numel = sum(param.numel() for param in params)
        shard_numel = math.ceil(numel / ranks)
        self.params, self.ranks, self.rank = params, ranks, rank
        self.flat = torch.zeros(ranks * shard_numel, dtype=params[0].dtype)
        self.flat_grad = torch.zeros_like(self.flat)
        for param, view in zip(params, self.views_of(self.flat), strict=True):
            view.copy_(param.detach())
            param.data = view
        if ranks > 1:
            dist.broadcast(self.flat, src=0)  # all ranks start from the same weights
        self.shard = self.flat.chunk(ranks)[rank]
        self.grad_shard = self.flat_grad.chunk(ranks)[rank]
        self.master = self.shard.float()  # in an fp32 model it is the shard itself
        self.exp_avg = torch.zeros_like(self.master)
        self.exp_avg_sq = torch.zeros_like(self.master)

    def views_of(self, flat):
        """The places of the parameters in a flat tensor, in their shapes."""
        sizes = [param.numel() for param in self.params]
        pieces = flat[: sum(sizes)].split(sizes)
        return [piece.view(param.shape) for piece, param in zip(pieces, self.params, strict=True)]


class ReferenceStep:
    """One optimizer step, from the gradients that backward has left in `.grad` to weights that are the same everywhere.

        step = ReferenceStep(model.parameters(), lr=1e-3)
        (loss * step.loss_scale).backward()
        norm, skipped = step()

    All parameters are on the CPU, in one dtype, and have a gradient. Every rank makes it with the same model.
    """

    def __init__(
        self,
        params,
        *,
        lr,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.01,
        max_norm=1.0,
        loss_scale=2.0**16,
        growth_interval=2000,
        bucket_numel=1_000_000,
    ):
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.max_norm, self.loss_scale, self.growth_interval = max_norm, loss_scale, growth_interval
        self.ranks, self.rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self.applied_steps = self.clean_steps = 0
        buckets = [[]]
        for param in reversed(list(params)):  # backward reaches the last layer first
            if sum(other.numel() for other in buckets[-1]) >= bucket_numel:
                buckets.append([])
            buckets[-1].append(param)
        self.buckets = [Bucket(bucket, self.ranks, self.rank) for bucket in buckets]

    @torch.no_grad()
    def __call__(self):
        """Step, and return the norm of the gradient before clipping, and whether the step was skipped."""
        self.reduce_gradients()
        norm = self.gradient_norm() / self.loss_scale
        skipped, grad_scale = self.decide(norm)
        if not skipped:
            self.applied_steps += 1
            for bucket in self.buckets:
                self.update(bucket, grad_scale)
            self.gather_parameters()
        self.update_loss_scale(skipped)
        return norm, skipped

    def reduce_gradients(self):
        for bucket in self.buckets:
            for param, view in zip(bucket.params, bucket.views_of(bucket.flat_grad), strict=True):
                view.copy_(param.grad)
                param.grad = None
            if self.ranks > 1:
                dist.reduce_scatter(bucket.grad_shard, list(bucket.flat_grad.clone().chunk(self.ranks)))
                bucket.grad_shard.div_(self.ranks)

    def gradient_norm(self):
        squares = sum(bucket.grad_shard.double().square().sum() for bucket in self.buckets)
        if self.ranks > 1:
            dist.all_reduce(squares)
        return squares.sqrt().float()

    def decide(self, norm):
        """Whether to skip the step, and what the gradients are divided by: the loss scale over the clip coefficient."""
        if not norm.isfinite():
            return True, None
        coefficient = self.max_norm / (norm + 1e-6) if norm > self.max_norm else 1.0
        return False, self.loss_scale / coefficient

    def update(self, bucket, grad_scale):
        (beta1, beta2), step = self.betas, self.applied_steps
        grad = bucket.grad_shard.float() / grad_scale
        bucket.master.mul_(1 - self.lr * self.weight_decay)
        bucket.exp_avg.lerp_(grad, 1 - beta1)
        bucket.exp_avg_sq.lerp_(grad.square(), 1 - beta2)
        mean = bucket.exp_avg / (1 - beta1**step)
        mean_square = bucket.exp_avg_sq / (1 - beta2**step)
        bucket.master.sub_(self.lr * mean / (mean_square.sqrt() + self.eps))
        bucket.shard.copy_(bucket.master)  # rounds to the model's dtype

    def gather_parameters(self):
        for bucket in self.buckets:
            if self.ranks > 1:
                dist.all_gather(list(bucket.flat.chunk(self.ranks)), bucket.shard.clone())

    def update_loss_scale(self, skipped):
        self.clean_steps = 0 if skipped else self.clean_steps + 1
        if skipped:
            self.loss_scale /= 2
        elif self.clean_steps == self.growth_interval:
            self.loss_scale, self.clean_steps = self.loss_scale * 2, 0
