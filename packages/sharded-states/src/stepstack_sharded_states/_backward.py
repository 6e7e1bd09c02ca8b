"""What happens during backward: gradients arrive, full buckets are launched, the last of them waits."""

import sys
import weakref
import zlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from stepstack_sharded_states._bucket import Bucket, Member
from stepstack_sharded_states._mesh import Ranks, this_rank
from stepstack_sharded_states._norms import Norms
from stepstack_sharded_states._owners import own
from stepstack_sharded_states._sharded_grad import ShardedGrad
from stepstack_sharded_states._written import brought, check_unwritten, unseen


class Backward:
    """Follows the gradients of some buckets: takes each as backward makes it, reduces buckets as they fill.

    Buckets are launched in one fixed order, whatever order they fill in, so that all ranks agree. The end of a
    backward launches those that are left, and waits.
    """

    def __init__(self, *, find_unused: bool, zero_fill_unused: bool, before_close: Callable[[], None]) -> None:
        self.buckets: list[Bucket] = []
        self._find_unused, self._zero_fill_unused = find_unused, zero_fill_unused
        self.synchronising = True
        self.before_reducing: Callable[[], None] = _nothing
        """Called at the first gradient of each backward that reduces: which parameters are listed may change in it."""
        self._launched = 0
        self._end: weakref.ref[Callable[[], None]] | None = None  # what the engine calls at the end of this backward
        self._stepped = False
        self._newest: Member | None = None  # whose gradient came last, if no step has used it
        self._norms: dict[Ranks, Norms] = {}
        self._nodes: list[object] = []
        self._give_back: list[Callable[[], object]] = []
        self._before_close = before_close
        self._closed: str | None = None

    def follow(self, buckets: Iterable[Bucket]) -> None:
        """Take these buckets' gradients from now on; they are launched after those followed before."""
        for bucket in buckets:
            self.buckets.append(bucket)
            self._hook(bucket)

    def finish(self) -> None:
        """Reduce what no backward has: accumulated under `no_sync`, or assigned to `.grad` by hand. Collective then."""
        self.check_open()
        self._check_last_backward()
        self._follow_the_caller()
        self._take_out_added()
        for bucket in self.buckets:
            bucket.gradients.check_settled(bucket.members)
            for member in bucket.members:
                if member.group is not None and member.is_new():
                    self._start_afresh()
                    self._check_replaceable(member)
                    self._take_from_hand(bucket, member)
        waiting = any(bucket.gradients.set_aside for bucket in self.buckets)
        if waiting or any(member.unreduced for bucket in self.buckets for member in bucket.members):
            self._reduce()

    def look(self, bucket: Bucket, member: Member) -> None:
        """Let its `grad_shard` be what the caller has made of its `.grad`. Raises RuntimeError where it can't be."""
        if member.group is None or not member.in_place:
            return
        if member.forgotten or member.is_new() or member.regrouped:
            self._follow_the_caller()
            if member.is_new():
                self._start_afresh()
                self._check_replaceable(member)
                if member.gradients.replaceable:
                    self._take_from_hand(bucket, member)
        if not member.gradients.replaceable and (member.is_new() or (member.used and not member.reduced)):
            raise RuntimeError(
                f"{this_rank()}: the gradient of parameter {member.name!r} is not averaged over the ranks yet, since "
                "it was accumulated in no_sync() or assigned by hand: call grad_shards() of the optimizer before"
            )

    def zero_grad(self, set_to_none: bool) -> None:
        for bucket in self.buckets:
            bucket.zero_grad(set_to_none)
        self._launched, self._end, self._stepped, self._newest = 0, None, False, None

    def stepped(self) -> None:
        """A step has used the gradients: they can still be looked at, the next one to arrive starts afresh."""
        self._stepped, self._newest = True, None
        for bucket in self.buckets:
            bucket.gradients.spent = True

    def close(self, reason: str) -> None:
        """Give the parameters back, each with storage of its own. Gradients that are whole here stay, if no step has
        used them; others are given up. From now on the optimizer only says `reason`."""
        if self._closed is not None:
            return
        self._before_close()
        for give_back in self._give_back:
            give_back()
        for bucket in self.buckets:
            for member in bucket.members:
                if member.in_place:
                    member.param.data = member.param.detach().clone()
                    if member.param.grad is not None and member.param.grad is member.whole:
                        member.param.grad = member.whole.clone()
        self._closed = reason

    def _release(self, name: str) -> None:
        self._follow_the_caller()
        pending = [m for bucket in self.buckets for m in bucket.members if m.used and not m.gradients.replaceable]
        if pending and self._newest is not None:
            raise RuntimeError(
                f"{this_rank()}: parameter {name!r} is to be trained by another ShardedOptimizer, but parameter "
                f"{pending[0].name!r} has a gradient that no step of the first one has used: step() it, or zero_grad()"
            )
        self.close(f"its parameter {name!r} was given to another ShardedOptimizer, which trains it now")

    def brought(self) -> None:
        """All ranks have, or are about to get, what is in the shards now."""
        brought(self.buckets)

    def check_writable(self, member: Member) -> None:
        """Raise RuntimeError if no step is about to bring to other ranks what is written to a shard."""
        if self._newest is None and self._closed is None:
            raise RuntimeError(unseen(member, "is to be"))

    def check_open(self) -> None:
        """Raise RuntimeError if the optimizer was closed."""
        if self._closed is not None:
            raise RuntimeError(f"{this_rank()}: this ShardedOptimizer is closed: {self._closed}")

    def check_used(self) -> None:
        """Raise RuntimeError if gradients wait for a step: whoever saves states now would lose them."""
        self._follow_the_caller()
        if self._newest is not None:
            raise RuntimeError(
                f"{this_rank()}: parameter {self._newest.name!r} has a gradient that no step has used, and checkpoints "
                "hold none: save after step(), or give the gradients up with zero_grad() of the optimizer"
            )

    def _hook(self, bucket: Bucket) -> None:
        norms = self._norms.setdefault(bucket.ranks, Norms(bucket.ranks))
        ours = weakref.ref(self)
        own((member.param for member in bucket.members), self._release)
        for member in bucket.members:
            member.norms = norms
            norms.members.append(member)
            member.param.current_grad_shard = _current(ours, bucket, member)  # type: ignore[attr-defined]
            # A hook of the node, since one of the parameter would be called by torch.autograd.grad too.
            node = torch.autograd.graph.get_gradient_edge(member.param).node
            self._nodes.append(node)  # which only its graph keeps, else
            handles = [
                node.register_prehook(_before_accumulation(ours, bucket, member)),
                member.param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    _after_accumulation(ours, bucket, member)
                ),
            ]
            for handle in handles:
                self._give_back.append(weakref.finalize(self, handle.remove))  # the model may outlive its optimizer
            self._give_back.append(weakref.finalize(self, member.hide))
            if member.ranks.shards > 1:
                member.shard.before_writing = _before_writing(ours, member)  # type: ignore[attr-defined]

    def _prepare(self, bucket: Bucket, member: Member) -> None:
        if not member.in_place or member.group is None:
            member.take_away()
            return
        if self._stepped:
            self._start_afresh()
        elif member.used or bucket.gradients.is_occupied:
            if member.forgotten or member.is_new() or not bucket.followed:
                self._follow_the_caller()  # before anything in a bucket is moved
                for each in self.buckets:
                    each.followed = True
            if member.is_new():
                self._check_replaceable(member)
        bucket.gradients.before_accumulation(member)

    def _receive(self, bucket: Bucket, member: Member) -> None:
        if not member.in_place:
            return  # another optimizer has taken the parameter, or it was moved: then step() says so
        self._check_last_backward()
        self._start_afresh()
        reduces = self.synchronising or bucket.gradients.reduces_always
        if reduces and self._end is None:
            check_unwritten(self.buckets)
            self.before_reducing()
        listed = member.group is not None
        if bucket.launched and listed:
            raise RuntimeError(
                f"{this_rank()}: parameter {member.name!r} got another gradient in the same backward after its bucket "
                "was reduced, so part of it would be lost. Something inside this backward runs a backward of its own "
                "(a re-entrant activation checkpoint does): use use_reentrant=False, or run it under no_sync()"
            )
        if listed:
            self._take(bucket, member)
        if reduces:
            self._follow_to_its_end()
            bucket.arrived.add(member)
            self._launch_full()

    def _take(self, bucket: Bucket, member: Member) -> None:
        bucket.receive(member)
        self._newest = member

    def _take_from_hand(self, bucket: Bucket, member: Member) -> None:
        grad = member.param.grad
        if grad is not None and grad.requires_grad:
            member.param.grad = grad.detach()
        self._take(bucket, member)

    def _check_last_backward(self) -> None:
        if self._end is not None and self._end() is None:  # the engine has dropped it without a call
            raise RuntimeError(
                f"{this_rank()}: the last backward ended in an exception, so gradients are missing and reductions were "
                "left half done: call the optimizer's zero_grad(), on every rank, before going on"
            )

    def _start_afresh(self) -> None:
        if self._stepped:
            self._take_out_added()
            new = [(m, m.param.grad) for bucket in self.buckets for m in bucket.members if m.is_new()]
            self.zero_grad(set_to_none=True)
            for member, grad in new:
                member.param.grad = grad

    def _take_out_added(self) -> None:
        """Let what the caller has added in place to a `.grad` that stood for none be as if assigned to it."""
        for bucket in self.buckets:
            for member in bucket.gradients.added_by_hand(bucket.members):
                assert member.whole is not None
                member.param.grad = member.whole.clone()
                member.whole.zero_()
                member.version = member.whole_version

    def _follow_the_caller(self) -> None:
        """A `.grad` that was ours and is None has been forgotten by the caller (`model.zero_grad()`); one that was made
        of ours replaces it."""
        with torch._C.DisableTorchFunctionSubclass():  # which would take as long as all else here
            for member in [member for bucket in self.buckets for member in bucket.members if member.regrouped]:
                _take_from_group(member)
        for bucket in self.buckets:
            forgotten = []
            for member in bucket.members:
                grad = member.param.grad
                if grad is None:
                    if member.displayed and member.used:
                        forgotten.append(member)
                elif grad is not member.sharded and isinstance(grad, ShardedGrad) and grad.is_of(member):
                    bucket.gradients.replace(member)
            if forgotten:
                bucket.forget(forgotten)
        if self._newest is not None and not self._newest.used:
            self._newest = next((member for bucket in self.buckets for member in bucket.members if member.used), None)

    def _check_replaceable(self, member: Member) -> None:
        """Raise RuntimeError if a `.grad` that is not ours, of a parameter that has a gradient, can't be followed."""
        if member.used and not member.gradients.replaceable:
            raise RuntimeError(
                f"{this_rank()}: parameter {member.name!r} got something in .grad after its gradient was taken into a "
                "bucket: from DistributedDataParallel around the model, which isn't needed and averages nothing, or by "
                "hand, before which zero_grad() of the optimizer is needed. A gradient that was averaged is changed by "
                "in-place operations (p.grad.mul_)"
            )

    def _follow_to_its_end(self) -> None:
        if self._end is None:
            if _in_compiled_autograd():
                raise RuntimeError(
                    "compiled autograd can't trace what a ShardedOptimizer does in backward: compile the model's "
                    "forward only (torch.compile(model)), without torch._dynamo.config.compiled_autograd"
                )
            at_end = self._reduce
            self._end = weakref.ref(at_end)
            # The engine calls back when the backward it is in is over, as FSDP2 and DDP have it do.
            torch.autograd.Variable._execution_engine.queue_callback(at_end)

    def _launch_full(self) -> None:
        while self._launched < len(self.buckets):
            bucket = self.buckets[self._launched]
            if len(bucket.arrived) < len(bucket.members):
                return
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self.buckets[self._launched]
        if self._zero_fill_unused:
            for member in bucket.members:
                member.used = member.group is not None
        bucket.launch()
        self._launched += 1

    @torch.no_grad()
    def _reduce(self) -> None:
        while self._launched < len(self.buckets):
            self._launch_next()
        under_way = [bucket.gradients for bucket in self.buckets if bucket.gradients.under_way]
        for work in [gradients.across_replicas() for gradients in under_way]:
            work.wait()
        for gradients in under_way:
            gradients.collect()
        if self._find_unused:
            self._agree_on_what_is_used()
        for bucket in self.buckets:
            bucket.finish()
        self._launched, self._end = 0, None

    def _agree_on_what_is_used(self) -> None:
        """A gradient on one rank is a gradient for all, as in DDP."""
        of_mesh: dict[Ranks, list[Member]] = {}
        for bucket in self.buckets:
            of_mesh.setdefault(bucket.ranks, []).extend(bucket.members)
            bucket.gradients.differ = None  # they may
        for ranks, members in of_mesh.items():
            device = members[0].param.device
            groups = zlib.crc32(repr([member.group for member in members]).encode()) >> 2
            here = [*(member.used for member in members), groups, -groups]
            found = torch.tensor(here, dtype=torch.int32, device=device)
            ranks.all_reduce_max(found)
            *used, highest, lowest = found.tolist()  # waits: the host decides what to step
            if highest != -lowest:
                raise RuntimeError(
                    f"{this_rank()}: ranks differ in which of param_groups lists which parameters: edit them alike on "
                    "all ranks of the mesh"
                )
            for member, anywhere in zip(members, used, strict=True):
                member.used = bool(anywhere) and member.group is not None


def _take_from_group(member: Member) -> None:
    """Take the gradient that the caller has given to the shard, or forget it where that is None."""
    grad = member.shard.grad
    if not member.reduced:
        raise RuntimeError(
            f"{this_rank()}: a gradient was assigned to parameter {member.name!r} in param_groups, which had none that "
            "was averaged over the ranks: assign it to .grad of the model's parameter, on every rank"
        )
    if grad is None:
        if not member.is_new():
            member.param.grad = None
    else:
        member.shard_grad.copy_(grad.detach())
        member.gradients.settled([member])
        member.show(member.shard_grad)


def _before_writing(backward: "weakref.ref[Backward]", member: Member) -> Callable[[], None]:
    of = weakref.ref(member)  # which has what this is kept by

    def before_writing() -> None:
        alive, written = backward(), of()
        if alive is not None and written is not None:
            alive.check_writable(written)

    return before_writing


def _nothing() -> None:
    pass


def _in_compiled_autograd() -> bool:
    """Whether this backward is being traced, or run as what that gave; nobody need load the tracer for it."""
    tracer = sys.modules.get("torch._dynamo.compiled_autograd")
    return torch.compiler.is_compiling() or getattr(tracer, "in_compiled_autograd_region", False)


def _current(backward: "weakref.ref[Backward]", bucket: Bucket, member: Member) -> Callable[[], Tensor]:
    def current_grad_shard() -> Tensor:
        alive = backward()
        if alive is not None:
            with torch.no_grad():
                alive.look(bucket, member)
        return member.param.grad_shard  # type: ignore[attr-defined,no-any-return]

    return current_grad_shard


def _before_accumulation(
    backward: "weakref.ref[Backward]", bucket: Bucket, member: Member
) -> Callable[[tuple[Tensor | None, ...]], None]:
    def hook(grads: tuple[Tensor | None, ...]) -> None:
        alive = backward()
        if alive is not None and grads[0] is not None and member.param.requires_grad:
            alive._prepare(bucket, member)

    return hook


def _after_accumulation(backward: "weakref.ref[Backward]", bucket: Bucket, member: Member) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        alive = backward()
        if alive is not None:
            with torch.no_grad():
                alive._receive(bucket, member)

    return hook
