"""`ShardedOptimizer`: the optimizer that a training loop holds."""

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from stepstack_sharded_states._agreement import Skipped, agreed, objections
from stepstack_sharded_states._alike import announced, likely_ranks, lines
from stepstack_sharded_states._backward import Backward
from stepstack_sharded_states._bucket import Member
from stepstack_sharded_states._callers_state import CallersState
from stepstack_sharded_states._distribution import Distribution
from stepstack_sharded_states._edits import Listing
from stepstack_sharded_states._elementwise import check_class, check_elementwise
from stepstack_sharded_states._gather import Gather
from stepstack_sharded_states._inner import copy_options, flag_of, step_inner, wait_for_offloaded
from stepstack_sharded_states._params import (
    Group,
    check_in_place,
    check_mesh,
    name_alike,
    read_groups,
    refuse,
)
from stepstack_sharded_states._saving import SavedStates, refuse_to_be_looked_up


class ShardedOptimizer(SavedStates):
    """Any elementwise torch optimizer, its states spread over the ranks of a mesh (ZeRO stages 1 and 2's idea, see
    Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054).

        optimizer = ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, lr=3e-4)
        loss.backward()        # gradients are averaged over the ranks while backward runs
        optimizer.step()       # each rank steps the slice it owns, then gathers the others' slices
        optimizer.zero_grad()

    is what DistributedDataParallel with `torch.optim.AdamW` computes, at 1/n of the memory for states.

    Parameters
    - params: as torch's optimizers take them: parameters, (name, parameter) pairs, or groups of either. Floating point,
      on one type of device, their module already in its final place, dtype and memory format: from here on they are
      views of flat buffers. Those with `requires_grad=False` stay out.
    - optimizer_class: what steps the slices, and gets the keyword arguments left over. Elementwise: its update of an
      element may depend on nothing but that element's history.
    - mesh: (shard) or (replicate, shard), of torch.distributed.device_mesh. None is the default process group, or this
      process alone where there is none. Every rank of the mesh makes the optimizer with the same parameters in the same
      order; all start with the values of its first rank.
    - grad_dtype: in which gradients accumulate, are reduced and reach the inner optimizer. None: each parameter's own.
    - inner_dtype: float32 under a bfloat16 model keeps a master copy of this rank's slices, which the inner optimizer
      trains in full precision and from which the model's parameters are rounded. The master wins: after loading weights
      into the model, call `refresh_from_model()`. None: no copy; an inner optimizer may have masters of its own.
    - find_unused_parameters: ranks may differ in which parameters have a gradient: one that has none here counts as
      zero if it has one elsewhere. Costs a small reduction and one wait for the device in each backward that reduces.
    - shard_gradients: between backwards only this rank's slice of the gradients takes memory (ZeRO stage 2). Every
      backward reduces then, in `no_sync()` too.
    - capturable: `.grad`s are views of the buckets, at the same addresses for ever, and are zeroed by one fill a
      bucket, so that a CUDA graph may capture backward, step and `zero_grad()`. Between backward and step their
      contents are unspecified. With `set_to_none=False` parameters without a gradient are stepped as if it were zero.
    - state_device: where the states and what the inner optimizer steps live, "cpu" under a model on GPUs. Gradients are
      copied there and parameters back, by buckets; the step waits for the gradients. None: where the parameters are.
    - offload_ratio: the part of the elements, in whole buckets, to which `state_device` applies.
    - grad_divisor: what the sum over ranks is divided by; 1 leaves the sum. None: the number of ranks in `mesh`.
    - grad_predivisor: a part of that divisor, by which each gradient is divided before the sum, lest it overflow fp16.
    - zero_fill_unused: a parameter without a gradient is stepped as if it were zero, instead of being skipped.
    - norm_owner: a function of a parameter's name and the parameter that says to which part of a norm its gradient
      belongs ("tensor-parallel duplicate", say), for `grad_shards_by_owner()`. Those of one owner lie together.
    - bucket_cap_mb: size, in MiB of gradients, from which on a bucket is reduced as a unit.
    - elementwise: True says that you know optimizer_class to be elementwise with these arguments. Otherwise all classes
      but those of torch that are, and those with `elementwise = True` in their body, are tried, some milliseconds for a
      class and its arguments: TypeError where small tensors end elsewhere when trained in slices, or can't be trained.

    Gradients: in backward, each is moved into its bucket. Afterwards `.grad` is a view of it in one process; on several
    ranks it is a tensor that knows the norm of the whole, can be scaled and zeroed, and raises where a part won't do.
    `grad_shards()`, and `grad_shard` on each parameter, are this rank's parts. Every backward that is not under
    `no_sync()` ends with the mean over the mesh, added to what earlier ones left. A step uses gradients up: the next
    backward starts afresh, with or without `zero_grad()`; and `p.grad = None` forgets one. A parameter without a
    gradient is skipped as torch skips it; which ones have one must be the same on all ranks, unless
    `find_unused_parameters`: a step on which ranks differ is skipped on all of them, and the mesh's last rank warns
    when it hears of that.

    Loss scaling and deferred clipping: attributes `grad_scale` (divides) and `found_inf` (not 0: nothing changes), as
    in torch's fused optimizers; set `found_inf` on every rank or on none, its maximum over the mesh is left in it. An
    optimizer_class without them works too, at the price of one wait for the device in each step of several ranks or
    with a `found_inf`; without one it raises RuntimeError, on all ranks, where they differ in what has a gradient. A
    third attribute, `found_inf_is_agreed`, spares one step's reduction: see `grad_shards_with_objections()`.
    """

    _step_supports_amp_scaling = True
    found_inf_is_agreed = False
    """In the next step `found_inf` need not be reduced."""

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        *,
        mesh: DeviceMesh | None = None,
        grad_dtype: torch.dtype | None = None,
        inner_dtype: torch.dtype | None = None,
        state_device: torch.device | str | None = None,
        offload_ratio: float = 1.0,
        grad_divisor: float | None = None,
        grad_predivisor: float = 1.0,
        shard_gradients: bool = False,
        capturable: bool = False,
        find_unused_parameters: bool = False,
        zero_fill_unused: bool = False,
        norm_owner: Callable[[str, nn.Parameter], Hashable] | None = None,
        bucket_cap_mb: float = 25.0,
        elementwise: bool = False,
        **optimizer_kwargs: Any,
    ) -> None:
        groups: list[Group] = []
        with announced(lambda: likely_ranks(mesh, groups)):
            check_class(optimizer_class)
            groups += read_groups(params)
            check_mesh(mesh)
            device = next(param for group in groups for _, param in group.params).device
            refuse(groups, device.type if mesh is None else mesh.device_type)
            dtype = inner_dtype or next(param.dtype for group in groups for _, param in group.params)
            home = device if state_device is None else torch.device(state_device)
            arguments = optimizer_class, optimizer_kwargs, dtype, home
            self._try = None if elementwise else partial(check_elementwise, *arguments)
            if self._try is not None:
                self._try([group.options for group in groups])
            self._distribution = Distribution(
                mesh,
                device,
                grad_divisor=grad_divisor,
                grad_predivisor=grad_predivisor,
                grad_dtype=grad_dtype,
                inner_dtype=inner_dtype,
                state_device=None if state_device is None else torch.device(state_device),
                offload_ratio=offload_ratio,
                shard_gradients=shard_gradients,
                capturable=capturable,
                bucket_cap_mb=bucket_cap_mb,
                norm_owner=norm_owner,
            )
        self._gather, self._skipped = Gather(), Skipped()
        with self._distribution.announced():
            of_backward = {"find_unused": find_unused_parameters, "zero_fill_unused": zero_fill_unused}
            self._backward = Backward(**of_backward, before_close=self._gather.finish)
            of_class = {"optimizer_class": optimizer_class, **optimizer_kwargs}
            planned = self._distribution.plan(groups, lines("option", {**of_class, **of_backward}))
        buckets = self._distribution.buckets_of(planned)
        with self._distribution.announced():
            self._inner = optimizer_class([group.of_pieces() for group in groups], **optimizer_kwargs)
            super().__init__([group.of_shards() for group in groups], self._inner.defaults)
            self._listing = Listing(self._inner)
            self.state = CallersState(self._listing.member_of)
            self._listing.add(groups, self.param_groups)
            copy_options(self._inner.param_groups, self.param_groups)
        self._distribution.compare(planned.options(self._inner.param_groups))
        self._backward.follow(buckets)
        self._backward.before_reducing = self._listing.watching(self)
        self._listing.show_states(self.state)

    @overload
    def step(self, closure: None = None, **inner: Any) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], **inner: Any) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, **inner: Any) -> float | None:
        """Step the slice that this rank owns and gather the others'. Every rank of the mesh calls this.

        Other keyword arguments go to `step` of the inner optimizer.
        """
        self._backward.check_open()
        refuse_to_be_looked_up(sys._getframe(1))
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        is_agreed, self.found_inf_is_agreed = self.found_inf_is_agreed, False
        self._skipped.say()
        self._whole = None
        self._distribution.check_ranks()
        self._follow_edits()
        self._gather.finish()
        check_in_place(self._listing.groups)
        self._backward.finish()
        for bucket in self._backward.buckets:
            bucket.before_step()
        wait_for_offloaded(self._backward.buckets)
        flags = {name: flag_of(self, name) for name in ("grad_scale", "found_inf")}
        skip = self._agree(flags["found_inf"], is_agreed)
        step_inner(self._inner, self._listing.members(), **flags, skip=skip, arguments=inner)
        self._spread(member for member in self._listing.members() if member.used)
        self._backward.stepped()
        return loss

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """`train()` and `eval()` where the inner optimizer has them, as schedule-free ones do."""
            if name in ("train", "eval") and callable(getattr(self.__dict__.get("_inner"), name, None)):
                return partial(self._switch, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    @torch.no_grad()
    def _switch(self, mode: str) -> None:
        """Let the inner optimizer change its slices in place, and gather them. Every rank of the mesh calls this."""
        self._backward.check_open()
        self._whole = None
        self._follow_edits()
        check_in_place(self._listing.groups)
        self._gather.finish()
        getattr(self._inner, mode)()
        self._spread(self._listing.members())

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; or, with `set_to_none=False`, go on from zero for those that are there."""
        self._backward.check_open()
        self._skipped.say()
        self._listing.follow(self.param_groups)
        with torch._C.DisableTorchFunctionSubclass():  # parameters that have not arrived need not be asked each time
            self._backward.zero_grad(set_to_none)

    @torch.no_grad()
    def grad_shards(self) -> list[Tensor]:
        """The averaged gradients, one for each parameter, in the order of `param_groups`: 1-D DTensors over the mesh,
        empty where there is no gradient or where other ranks own it; plain tensors where there is no mesh.

        A parameter's last 64 elements may be padding, zero. Every rank of the mesh calls this: gradients that no
        backward has reduced (accumulated under `no_sync()`, assigned by hand) are reduced now.
        """
        self._listing.follow(self.param_groups)
        self._backward.finish()
        return [member.shown_grad for member in self._listing.members()]

    @torch.no_grad()
    def grad_shards_with_objections(self) -> list[Tensor]:
        """`grad_shards()`, and for each mesh an element that is NaN if its ranks differ in what has a gradient, else 0.

            norm = total_norm(optimizer.grad_shards_with_objections())  # of stepstack_gradnorm
            optimizer.found_inf, optimizer.found_inf_is_agreed = (~norm.isfinite()).float(), True

        says of the whole step whether it counts, the same on all ranks of the mesh: `step()` need not ask them again.
        With parameters in several meshes it does so all the same. It sets `found_inf_is_agreed` back: that says
        nothing of the flag of another step.
        """
        return self.grad_shards() + objections(self._backward.buckets, self._distribution.ranks)

    @torch.no_grad()
    def grad_shards_by_owner(self) -> dict[Hashable, list[Tensor]]:
        """`grad_shards()`, apart for each of `norm_owner`'s values, in the order in which they first occur.

            parts = [Part(shards, groups[owner]) for owner, shards in optimizer.grad_shards_by_owner().items()]
            norm = total_norm(parts)  # both of stepstack_gradnorm

        is the norm of a model of which other ranks, outside of the mesh, hold other parts and duplicates: `groups` has
        for each owner the process groups whose ranks hold different pieces.
        """
        self._listing.follow(self.param_groups)
        self._backward.finish()
        shards: dict[Hashable, list[Tensor]] = {}
        for member in self._listing.members():
            shards.setdefault(member.owner, []).append(member.shown_grad)
        return shards

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here only accumulate, on this rank. The first one outside reduces the sum."""
        before, self._backward.synchronising = self._backward.synchronising, False
        try:
            yield
        finally:
            self._backward.synchronising = before

    def overlap_gather(self, module: nn.Module) -> None:
        """From now on `step()` only starts gathering, and whoever reads a parameter, in whatever way, waits for its
        bucket, so that the rest arrives under the forward of others.

        Buckets for which that can't be promised are gathered in `step()`, with a warning that says why: parameters of
        a class of their own, those with views that something holds, groups added later (until the next call); and all
        of them once the model is compiled. Modules in `module` wait in front of their forward as well, for kernels
        that torch does not know; ValueError for a parameter that is in none. What reads a parameter past torch's
        operations (`torch.func` transforms outside of a module, collectives of the parameter itself, CUDA graphs
        captured before, addresses kept) calls `synchronize()` before.
        """
        self._gather.under_forward(module, self._backward.buckets)

    def synchronize(self) -> None:
        """Wait until the parameters are those of the last step."""
        self._gather.finish()

    def close(self) -> None:
        """Give the parameters back to the model: plain ones, in storages of their own, whose gradients backward leaves
        on each rank, so that another optimizer can train them while something (a scheduler) still holds this one.

        Gradients that no step has used are given up on several ranks; a process alone keeps them in `.grad`. Steps,
        groups and gradients are refused from then on; state dicts are still given. Another ShardedOptimizer that is
        made of a parameter closes this one by itself.
        """
        self._backward.close("close() was called")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters between steps: new ones in buckets of their own, or such as were taken out of their group.

        Every rank of the mesh calls this.
        """
        if not hasattr(self, "_listing"):  # torch's constructor adds what ours has cut already
            super().add_param_group(param_group)
            return
        self._backward.check_open()
        self._whole = None
        self._gather.finish()
        with self._distribution.announced():
            self._follow_edits()
            groups = [self._listing.read(param_group)]
            name_alike(groups, self._listing.groups)
            refuse(groups, self._distribution.device.type, taken=[member.param for member in self._listing.members()])
            if self._try is not None:
                self._try([group.options for group in groups])
            back = self._listing.set_apart(groups[0])
            planned = self._distribution.plan(groups, [f"parameter {name!r}, again" for name, _ in back.values()])
        buckets = self._distribution.buckets_of(planned)
        self._listing.put_back(groups[0], back)
        with self._distribution.announced():
            self._inner.add_param_group(groups[0].of_pieces())
            super().add_param_group(groups[0].of_shards())
        self._listing.add(groups, self.param_groups)
        copy_options(self._inner.param_groups, self.param_groups)
        self._distribution.compare(planned.options(self._inner.param_groups))
        self._backward.follow(buckets)
        self._listing.show_states(self.state)

    def _spread(self, changed: Iterable[Member]) -> None:
        """What the inner optimizer has changed reaches the model on all ranks, and callers."""
        for bucket in self._backward.buckets:
            bucket.after_step()
        self._gather.start(reversed(self._backward.buckets), changed)  # forward needs first what backward reaches last
        self._backward.brought()
        copy_options(self._inner.param_groups, self.param_groups)
        self._listing.show_states(self.state)

    def _agree(self, found_inf: Tensor | None, already: bool) -> Tensor | None:
        buckets, meshes = self._backward.buckets, self._distribution.ranks
        if found_inf is not None or getattr(self._inner, "_step_supports_amp_scaling", False):  # else it would raise
            self._skipped.note(buckets, meshes)
        return agreed(found_inf, buckets, meshes, already=already)
