"""Whoever reads a parameter under overlap_gather reads the new one, though gathers arrive at the last moment."""

import copy
import os
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import nn

import stepstack_sharded_states._gather as gather
import stepstack_sharded_states._mesh as mesh
from stepstack_sharded_states import ShardedOptimizer
from stepstack_sharded_states._collectives import Pending, all_gather
from stepstack_testing import on_ranks


def late_all_gather(flat, mine, group):
    """One whose result is seen after wait() only, as on a slow network."""
    arriving = flat.clone()
    start = (mine.data_ptr() - flat.data_ptr()) // flat.element_size()
    own = arriving[start : start + mine.numel()]
    under_way = all_gather(arriving, own, group)

    def arrive():
        under_way.wait()
        flat.copy_(arriving)

    return Pending(then=arrive)


def old(wrap, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return wrap(nn.Linear(8, 8), *args)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x).tanh())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Head(Plain):
    def forward(self, x):
        return F.linear(self.first(x), self.second.weight)


class Unbound(Plain):
    def forward(self, x):
        return self.second.forward(self.first.forward(x))


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        make = lambda: nn.ParameterList([nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))])  # noqa: E731
        self.lists = nn.ModuleList([make(), make()])
        self.dicts = nn.ModuleDict({"a": nn.ParameterDict({"b": nn.Parameter(torch.randn(8, 8))})})

    def forward(self, x):
        for weights in self.lists:
            for weight in weights:
                x = (x @ weight).tanh()
        return x @ self.dicts["a"]["b"]


class Method(Plain):
    def run(self, x):
        return x @ self.first.weight + self.second.bias


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Own(Plain):
    def forward(self, x):
        return x @ Doubled.apply(self.first.weight) + torch.ops.aten.mm.default(x[0], self.second.weight)


class Called(Plain):
    def forward(self, x):
        values = dict(self.named_parameters())
        loss = torch.func.grad(lambda values: torch.func.functional_call(Plain(), values, (x,)).sum())
        return super().forward(x) + loss({k: v.detach() for k, v in values.items()})["second.bias"]


def hooked():
    model = Plain()
    model.second.register_forward_pre_hook(lambda module, args: (args[0] * module.weight.detach().mean(),))
    return model


MODELS = {
    "plain": Plain,
    "weight_norm": lambda: nn.Sequential(old(nn.utils.weight_norm), old(nn.utils.weight_norm)),
    "spectral_norm": lambda: nn.Sequential(old(nn.utils.spectral_norm)),
    "prune": lambda: nn.Sequential(old(lambda linear: nn.utils.prune.l1_unstructured(linear, "weight", 0.3))),
    "parametrizations": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))),
    "attention": Attention,
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    "a weight that the parent reads": Head,
    "child.forward(x)": Unbound,
    "lists of lists": Lists,
    "LSTM": lambda: nn.LSTM(8, 8, batch_first=True),
    "a method": Method,
    "a Function and an operation": Own,
    "torch.func": Called,
    "a user's hook": hooked,
}


def clamp(model, _):
    for param in model.parameters():
        param.data.clamp_(-0.2, 0.2)


def average(model, averaged):
    for mean, param in zip(averaged, model.parameters(), strict=True):
        mean.lerp_(param.detach(), 0.5)
    torch._foreach_mul_(averaged, 0.5)


def copied(model, averaged):
    values = [
        nn.utils.parameters_to_vector(model.parameters()),
        nn.utils.parameters_to_vector(copy.deepcopy(model).parameters()),
    ]
    assert torch.equal(*values)
    averaged[0].add_(values[0].sum())


def penalised(model, averaged):
    averaged[0].add_(sum(p.square().sum() for p in model.parameters()).detach())


AFTER = {"nothing": lambda *_: None, "clamp_": clamp, "an average": average, "a copy": copied, "a penalty": penalised}


def train(make, after, *, late):
    torch.manual_seed(0)
    model = make()
    mesh.all_gather = late_all_gather if late else all_gather
    optimizer = ShardedOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1, bucket_cap_mb=1e-6)
    if late:
        optimizer.overlap_gather(model)
    averaged = [torch.zeros_like(param) for param in model.parameters()]
    seen, pending = [], 0
    for number in range(3):
        model.train(number < 2)
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(number))
        out = model.run(x) if hasattr(model, "run") else model(x)
        loss = (out[0] if isinstance(out, tuple) else out).square().mean()
        seen.append(loss.detach().clone())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        pending += len(optimizer._gather._pending)
        after(model, averaged)
    with torch.no_grad():
        out = model.run(x) if hasattr(model, "run") else model(x)
        seen.append(out[0] if isinstance(out, tuple) else out)
    return seen + averaged, pending


CASES = [(name, "nothing") for name in MODELS] + [("plain", after) for after in AFTER]


def test_every_reader_reads_what_it_reads_without_overlap():
    def check(rank):
        warnings.simplefilter("error", UserWarning)
        wrong = []
        for name, after in CASES:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*(nested|weight_norm).*")
                expected, _ = train(MODELS[name], AFTER[after], late=False)
                seen, pending = train(MODELS[name], AFTER[after], late=True)
            if not pending or not all(torch.equal(a, b) for a, b in zip(expected, seen, strict=True)):
                wrong.append((name, after, pending))
        return wrong

    assert on_ranks(2, check, timeout=120) == [[]] * 2


def test_the_models_differ_if_nobody_waits():
    def check(rank):
        expected, _ = train(Plain, AFTER["nothing"], late=False)
        gather.read_elsewhere = lambda _: None
        gather.kind_of = lambda _: nn.Parameter
        gather._Waiting.__call__ = lambda *_: None
        seen, _ = train(Plain, AFTER["nothing"], late=True)
        return all(torch.equal(a, b) for a, b in zip(expected, seen, strict=True))

    assert on_ranks(2, check) == [False] * 2


def step(model, optimizer, run=None):
    loss = (model if run is None else run)(torch.ones(2, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def made(model=None, **options):
    torch.manual_seed(0)
    model = Plain() if model is None else model
    mesh.all_gather = late_all_gather
    return model, ShardedOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.3, bucket_cap_mb=1e-6, **options)


ORDERS = ("overlap, compile", "compile, overlap", "compile, run, overlap", "run, overlap, run, compile", "part")


def compiled(order, fullgraph):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    model, optimizer = made()
    compiling = {"backend": backend, "fullgraph": fullgraph}
    run, losses = model, []
    for word in order.split(", "):
        if word == "compile":
            run = torch.compile(model, **compiling)
        if word == "part":
            model.second.compile(**compiling)
            optimizer.overlap_gather(model)
        if word == "run":
            losses.append(step(model, optimizer, run))
        if word == "overlap":
            optimizer.overlap_gather(model)
    losses += [step(model, optimizer, run) for _ in range(4)]
    return losses, len(graphs)


def test_a_compiled_model_reads_what_an_eager_one_reads_and_is_not_compiled_anew_in_each_step():
    def check(rank):
        warnings.simplefilter("ignore")
        model, optimizer = made()
        expected = [step(model, optimizer) for _ in range(6)]
        wrong = []
        for order in ORDERS:
            for fullgraph in (False, True):
                losses, graphs = compiled(order, fullgraph)
                torch.testing.assert_close(losses, expected[: len(losses)], rtol=1e-5, atol=1e-6)
                if graphs > (2 if "compile, run, overlap" in order else 1):
                    wrong.append((order, fullgraph, graphs))
        return wrong

    assert on_ranks(2, check, timeout=200) == [[]] * 2


def test_overlap_says_once_that_it_is_off_for_a_compiled_model():
    def check(rank):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compiled("overlap, compile", True)
        return sum("overlap_gather is off" in str(warning.message) for warning in caught)

    assert on_ranks(2, check, timeout=100) == [1, 1]


def test_a_held_view_is_a_reader_that_cannot_wait_so_its_bucket_is_gathered_in_the_step():
    def check(rank):
        model, optimizer = made()
        optimizer.overlap_gather(model)
        held = {"detach": lambda p: p.detach(), "data": lambda p: p.data, "numpy": lambda p: p.detach().numpy()}
        found = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for view_of in held.values():
                view = view_of(model.first.weight)
                step(model, optimizer)
                seen = torch.as_tensor(view).clone()
                found.append((len(optimizer._gather._pending), torch.equal(seen, model.first.weight)))
                del view
            step(model, optimizer)
            found.append(len(optimizer._gather._pending))
        assert ["'first.weight' has views" in str(warning.message) for warning in caught] == [True]
        return found

    buckets = 4
    assert on_ranks(2, check) == [[(buckets - 1, True)] * 3 + [buckets]] * 2


def test_what_reads_no_values_ends_no_overlap():
    def check(rank):
        model, optimizer = made()
        optimizer.overlap_gather(model)
        step(model, optimizer)
        model.zero_grad()
        for param in model.parameters():
            assert isinstance(param, nn.Parameter)
            assert (param.requires_grad, param.grad, param.is_leaf) == (True, None, True)
            assert (param.numel(), param.dtype, param.device.type) == (param.shape.numel(), torch.float32, "cpu")
            param.requires_grad_(True)
            assert {param: 1}[param]
        pending = len(optimizer._gather._pending)
        repr(model.first.weight), copy.deepcopy(model.second.bias)
        return pending, len(optimizer._gather._pending), {type(p) for p in copy.deepcopy(model).parameters()}

    assert on_ranks(2, check) == [(4, 2, {nn.Parameter})] * 2


def test_threads_and_children_of_a_process_read_what_has_arrived():
    def check(rank):
        model, optimizer = made()
        optimizer.overlap_gather(model)
        step(model, optimizer)
        sums = []
        threads = [threading.Thread(target=lambda: sums.append(model.first.weight.sum().item())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(sums)) == 1
        child = os.fork()
        if child == 0:
            os._exit(len(optimizer._gather._pending))
        _, status = os.waitpid(child, 0)
        return sums[0] == model.first.weight.sum().item(), status

    assert on_ranks(2, check) == [(True, 0)] * 2


def test_exported_traced_and_scripted_models_read_what_has_arrived():
    def check(rank):
        warnings.simplefilter("ignore")
        x, right = torch.ones(2, 8), []
        for make_run in (
            lambda model: torch.export.export(model, (x,)).module(),
            lambda model: torch.jit.trace(model, (x,)),
        ):
            model, optimizer = made()
            optimizer.overlap_gather(model)
            step(model, optimizer)
            run = make_run(model)
            right.append(torch.allclose(run(x), model(x)))
        with pytest.raises(AttributeError, match="script the model before that call"):
            torch.jit.script(copy.deepcopy(model))
        for make_run in (
            lambda model: torch.export.export(model, (x,)).module(),
            lambda model: torch.jit.trace(model, (x,)),
            torch.jit.script,
        ):
            model, optimizer = made()
            run = make_run(model)
            optimizer.overlap_gather(model)
            step(model, optimizer)
            out = run(x)
            right.append(torch.allclose(out, model(x)))
        model, optimizer = made(torch.jit.script(Plain()))
        optimizer.overlap_gather(model)
        step(model, optimizer)
        right.append(not optimizer._gather._pending)
        return right

    assert on_ranks(2, check, timeout=100) == [[True] * 6] * 2


def grown(param):
    return torch.nn.Parameter(param, requires_grad=False).square()


def reduced(param):
    found = param.new_zeros(param.shape)
    torch.distributed.all_gather([found.clone(), found], param)
    return found


READERS = {
    "Parameter(p)": grown,
    "as_subclass": lambda p: p.as_subclass(torch.Tensor) * 1,
    "detach": lambda p: p.detach() * 1,
    "vmap": lambda p: torch.func.vmap(lambda row: row * 2)(p),
    "jacfwd": torch.func.jacfwd(lambda p: p.square().sum()),
}
if hasattr(torch.distributed.distributed_c10d, "has_torch_function"):
    READERS["all_gather"] = reduced


def test_who_reads_a_parameter_past_torchs_operations_waits_where_it_can_be_seen():
    def check(rank):
        wrong = []
        for name, read in READERS.items():
            model, optimizer = made()
            optimizer.overlap_gather(model)
            step(model, optimizer)
            pending = len(optimizer._gather._pending)
            seen = read(model.first.weight)
            if len(optimizer._gather._pending) != pending - 1 or type(model.first.weight) is not nn.Parameter:
                wrong.append((name, "does not wait"))
            optimizer.synchronize()
            if not torch.equal(seen, read(model.first.weight)):
                wrong.append((name, "differs"))
        with pytest.raises(RuntimeError, match="weakref"):
            torch.utils.swap_tensors(model.first.weight, torch.zeros(8, 8))
        return wrong

    assert on_ranks(2, check) == [[]] * 2


def test_a_parameter_made_of_a_pending_one_is_what_it_is_of_a_plain_one():
    def check(rank):
        model, optimizer = made()
        optimizer.overlap_gather(model)
        step(model, optimizer)
        new = [nn.Parameter(model.first.weight), nn.Parameter(model.second.weight, False)]
        old = [model.first.weight, model.second.weight]
        return [
            (type(n), n.requires_grad, n.is_leaf, n.grad_fn, n.data_ptr() == o.data_ptr())
            for n, o in zip(new, old, strict=True)
        ]

    assert on_ranks(2, check) == [[(nn.Parameter, True, True, None, True), (nn.Parameter, False, True, None, True)]] * 2
