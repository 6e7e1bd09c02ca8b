"""The plugged optimizer beside Megatron's own: norms, weights, decisions, waits."""

import sys

import pytest
import torch

from stepstack_fused_adam import FusedAdamW
from stepstack_megatron import plug
from stepstack_testing import HostSyncs, Operations, on_ranks

pytestmark = pytest.mark.engine

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
REPLICATED = [(False, FP32), (False, BF16), (False, FP16)]
SHARDED = [(True, FP32), (True, BF16), (True, FP16)]
RANKS = {(1, 1): REPLICATED + SHARDED, (2, 1): REPLICATED + SHARDED, (4, 1): SHARDED, (4, 2): SHARDED}
STEPS, OVERFLOWS = 6, (1, 2)


@pytest.fixture(scope="module")
def runs(engine):
    """By ranks and instances, for each rank, what `beside` saw of each optimizer and dtype."""
    known = {}

    def of(ranks, instances):
        def run(rank):
            with engine(instances=instances) as megatron:
                return {case: beside(megatron, rank, ranks, *case) for case in RANKS[ranks, instances]}

        if (ranks, instances) not in known:
            known[ranks, instances] = on_ranks(ranks, run, timeout=60)
        return known[ranks, instances]

    return of


def beside(megatron, rank, ranks, distributed, dtype, **options):
    """Steps of Megatron's own optimizer, and of a plugged one, on the same gradients."""
    ways = []
    for plugged in (False, True):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(16, 9), torch.nn.LayerNorm(9))
        chunk = megatron.wrapped(module, dtype=dtype, distributed=distributed, **options)
        optimizer = megatron.optimizer(chunk, dtype=dtype, distributed=distributed)
        if plugged:
            plug(optimizer)
        steps = []
        for step in range(STEPS):
            grads = gradients(module, seed=100 * step + rank, size=1e-3 if step == 3 else 1.0)
            overflows = dtype == FP16 and step in OVERFLOWS and rank == ranks - 1
            megatron.backward(chunk, optimizer, grads, before_reduction=overflow if overflows else None)
            weights = [weight.clone() for weight in optimizer.chained_optimizers[0].get_parameters()]
            with HostSyncs() as syncs, Operations() as operations:
                success, norm, zeros = optimizer.step()
            waits = [name for name, where in zip(syncs, syncs.where, strict=True) if "/torch/optim/" not in where]
            unchanged = all(map(torch.equal, weights, optimizer.chained_optimizers[0].get_parameters()))
            steps.append(
                {
                    "success": bool(success),
                    "norm": None if norm is None else float(norm),
                    "zeros": None if zeros is None else int(zeros),
                    "scale": float(optimizer.get_loss_scale()),
                    "waits": waits,
                    "reductions": operations["c10d.allreduce_"],
                    "unchanged": unchanged,
                    "tensors": [type(number) for number in (success, norm, zeros)],
                }
            )
        if options.get("overlap_param_gather"):
            chunk.start_param_sync(force_sync=True)  # as the next forward would
        weights = [weight.detach() for weight in optimizer.chained_optimizers[0].get_parameters()]
        ways.append((steps, weights, [param.detach() for param in module.parameters()]))
        assert isinstance(optimizer.optimizer, FusedAdamW) == plugged
    return ways


def gradients(module, *, seed, size):
    generator = torch.Generator().manual_seed(seed)
    grads = {
        name: size * torch.randn(param.shape, generator=generator).to(torch.bfloat16).float()
        for name, param in module.named_parameters()
    }
    grads["0.weight"][:3] = 0
    return grads


def overflow(params):
    params["1.weight"].main_grad[2] = torch.inf


cases = pytest.mark.parametrize(
    ("ranks", "instances", "distributed", "dtype"),
    [(*key, *case) for key, cases_ in RANKS.items() for case in cases_],
    ids=lambda value: str(value).removeprefix("torch."),
)


@cases
def test_norms_zeros_scales_and_decisions_are_megatrons(runs, ranks, instances, distributed, dtype):
    for rank in runs(ranks, instances):
        (stock, _, _), (plugged, _, _) = rank[distributed, dtype]
        for theirs, ours in zip(stock, plugged, strict=True):
            assert ours["success"] == theirs["success"]
            assert ours["scale"] == theirs["scale"]
            assert ours["tensors"] == [torch.Tensor] * 3
            if theirs["success"]:
                assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-6)
                assert ours["zeros"] == theirs["zeros"] > 0
            else:
                assert ours["unchanged"]
                assert not torch.tensor(ours["norm"]).isfinite()
        skipped = [step for step, seen in enumerate(plugged) if not seen["success"]]
        assert skipped == ([*OVERFLOWS] if dtype == FP16 else [])


@cases
def test_weights_are_megatrons_to_a_millionth_and_the_models_to_a_unit_in_the_last_place(
    runs, ranks, instances, distributed, dtype
):
    for rank in runs(ranks, instances):
        (_, theirs, their_model), (_, ours, our_model) = rank[distributed, dtype]
        assert len(ours) > 0
        for one, other in zip(ours, theirs, strict=True):
            assert one.dtype == FP32
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
        for one, other in zip(our_model, their_model, strict=True):
            torch.testing.assert_close(one, other, rtol=torch.finfo(dtype).eps, atol=1e-6)


def asks_once():
    """Whether Megatron's first step asks all ranks if parameters have norms of their own."""
    return sys.modules["megatron.core"].__version__ >= "0.19"


@cases
def test_no_step_waits_where_megatrons_waits_for_the_flag_the_norm_and_the_zeros(
    runs, ranks, instances, distributed, dtype
):
    for rank in runs(ranks, instances):
        (stock, _, _), (plugged, _, _) = rank[distributed, dtype]
        assert [seen["waits"] for seen in plugged] == [[]] * STEPS
        successes = [seen["success"] for seen in stock]
        expected = [(dtype == FP16) + 2 * success for success in successes]
        expected[successes.index(True)] += asks_once()
        assert [len(seen["waits"]) for seen in stock] == expected


def test_the_norm_takes_one_reduction_and_the_zeros_another(runs):
    for distributed, dtype in SHARDED:
        for rank in runs(2, 1):
            (stock, _, _), (plugged, _, _) = rank[distributed, dtype]
            assert [seen["reductions"] for seen in plugged] == [2] * STEPS
            of_stock = next(seen["reductions"] for seen in stock if seen["success"])
            assert of_stock == 2 + (dtype == FP16) + asks_once()


def test_all_ranks_have_the_same_model(runs):
    for (ranks, instances), several in RANKS.items():
        first, *others = runs(ranks, instances)
        for case in several:
            for other in others:
                for one, another in zip(first[case][1][2], other[case][1][2], strict=True):
                    torch.testing.assert_close(one, another, rtol=0, atol=0)


@pytest.mark.parametrize("distributed", [False, True], ids=["replicated", "distributed"])
def test_small_buckets_that_overlap_backward_and_gradients_of_16_bits_are_megatrons_too(engine, distributed):
    options = {"grad_reduce_in_fp32": False, "overlap_grad_reduce": True, "bucket_size": 32}
    if distributed:
        options["overlap_param_gather"] = True

    def run(rank):
        with engine() as megatron:
            return beside(megatron, rank, 2, distributed, BF16, **options)

    for (stock, theirs, their_model), (plugged, ours, our_model) in on_ranks(2, run, timeout=60):
        for seen, expected in zip(plugged, stock, strict=True):
            assert seen["norm"] == pytest.approx(expected["norm"], rel=1e-6)
            assert seen["zeros"] == expected["zeros"]
            assert seen["waits"] == []
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
        for one, other in zip(our_model, their_model, strict=True):
            torch.testing.assert_close(one, other, rtol=torch.finfo(BF16).eps, atol=1e-6)
