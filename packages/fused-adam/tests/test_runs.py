"""Neighbours in memory cost what one tensor does, and stay parameters of their own."""

import weakref
from itertools import pairwise

import pytest
import torch

from stepstack_fused_adam import FusedAdamW
from stepstack_fused_adam._block8 import blocks
from stepstack_fused_adam._run import run_of
from stepstack_fused_adam._state import Precision, create, states_here
from stepstack_fused_adam._torch import TorchStep
from stepstack_testing import HostSyncs, Operations


class Pieces:
    """Adjacent 1-D parameters of one buffer in two groups, their gradients adjacent in another."""

    def __init__(self, count, dtype=torch.float32, numel=64):
        generator = torch.Generator().manual_seed(0)
        self.flat = torch.randn(count * numel, generator=generator).to(dtype)
        self.grad = torch.zeros_like(self.flat)
        self.params = [torch.nn.Parameter(piece) for piece in self.flat.split(numel)]
        self.pieces = self.grad.split(numel)
        half = count // 2
        self.groups = [
            {"params": self.params[:half]},
            {"params": self.params[half:], "weight_decay": 0.0, "lr": 0.2},
        ]

    def fill(self, seed, without=()):
        self.grad.copy_(torch.randn(self.grad.shape, generator=torch.Generator().manual_seed(seed)))
        for index, (param, piece) in enumerate(zip(self.params, self.pieces, strict=True)):
            param.grad = None if index in without else piece


def separate(pieces):
    """The same parameters, each in memory of its own, in fp32."""
    groups = [dict(group) for group in pieces.groups]
    for group in groups:
        group["params"] = [torch.nn.Parameter(param.detach().float().clone()) for param in group["params"]]
    return groups, [param for group in groups for param in group["params"]]


@pytest.mark.parametrize(
    ("dtype", "master_weights"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "fp32")]
)
@pytest.mark.parametrize("flagged", [False, True])
def test_a_thousand_pieces_dispatch_what_a_hundred_do(dtype, master_weights, flagged):
    counts = []
    for count in (100, 1000):
        pieces = Pieces(count, dtype)
        optimizer = FusedAdamW(pieces.groups, lr=0.1, master_weights=master_weights)
        pieces.fill(seed=0)
        optimizer.step()
        pieces.fill(seed=1)
        if flagged:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
        with Operations() as operations, HostSyncs() as syncs:
            optimizer.step()
        assert syncs == []
        counts.append(dict(operations))
    assert counts[0] == counts[1]
    assert sum(counts[0].values()) < 60


@pytest.mark.parametrize("master_weights", [None, "fp32"])
def test_separate_tensors_dispatch_the_same_however_many(master_weights):
    counts = []
    for count in (10, 50):
        params = [torch.nn.Parameter(torch.ones(3, 5, dtype=torch.bfloat16)) for _ in range(count)]
        optimizer = FusedAdamW(params, master_weights=master_weights)
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
            with Operations() as operations:
                optimizer.step()
        counts.append(dict(operations))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("order", ["as they lie", "backwards", "shuffled"])
def test_pieces_are_adamw_each_on_its_own(order):
    pieces = Pieces(12)
    groups, twins = separate(pieces)
    for group in (*pieces.groups, *groups):
        if order == "backwards":
            group["params"] = group["params"][::-1]
        elif order == "shuffled":
            group["params"] = group["params"][1::2] + group["params"][::2]
    optimizer = FusedAdamW(pieces.groups, lr=0.1)
    reference = torch.optim.AdamW(groups, lr=0.1, foreach=False)
    without = [(), (), (3, 8), (3,), (), (0, 11), ()]
    for seed, missing in enumerate(without):
        pieces.fill(seed, missing)
        for param, twin in zip(pieces.params, twins, strict=True):
            twin.grad = None if param.grad is None else param.grad.clone()
        optimizer.step()
        reference.step()
    for param, twin in zip(pieces.params, twins, strict=True):
        state, expected = optimizer.state[param], reference.state[twin]
        assert state["step"] == expected["step"]
        torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state["exp_avg"], expected["exp_avg"], rtol=1e-6, atol=1e-7)


def test_pieces_lie_side_by_side_and_each_has_its_own_count():
    pieces = Pieces(6)
    optimizer = FusedAdamW(pieces.groups)
    pieces.fill(seed=0)
    optimizer.step()
    states = [optimizer.state[param] for param in pieces.params]
    for a, b in pairwise(states[:3]):
        assert a["step"].data_ptr() + 4 == b["step"].data_ptr()
        assert a["exp_avg"].data_ptr() + 4 * 64 == b["exp_avg"].data_ptr()
    first = states[0]["step"]
    pieces.fill(seed=1, without=[1])
    optimizer.step()
    assert states[0]["step"] is first
    assert [state["step"].item() for state in states] == [2, 1, 2, 2, 2, 2]


def test_a_piece_that_misses_its_first_gradient_joins_later_alone():
    pieces = Pieces(4)
    optimizer = FusedAdamW(pieces.params)
    pieces.fill(seed=0, without=[2])
    optimizer.step()
    assert pieces.params[2] not in optimizer.state
    pieces.fill(seed=1)
    optimizer.step()
    assert [optimizer.state[param]["step"].item() for param in pieces.params] == [2, 2, 1, 2]


def test_gradients_apart_are_right_for_parameters_together():
    pieces, twin = Pieces(4), Pieces(4)
    optimizer, reference = FusedAdamW(pieces.params), FusedAdamW(twin.params)
    for seed in range(3):
        pieces.fill(seed)
        twin.fill(seed)
        if seed == 1:
            for param in pieces.params:
                param.grad = param.grad.clone()
        optimizer.step()
        reference.step()
    assert torch.equal(pieces.flat, twin.flat)


def test_no_memory_moves_after_the_first_step():
    pieces = Pieces(6, torch.bfloat16)
    optimizer = FusedAdamW(pieces.groups, master_weights="fp32")

    def addresses():
        return [value.data_ptr() for param in pieces.params for value in optimizer.state[param].values()]

    pieces.fill(seed=0)
    optimizer.step()
    before = addresses()
    saved = optimizer.state_dict()
    pieces.fill(seed=1)
    optimizer.step()
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert addresses() == before


def test_a_gradient_is_not_kept_alive():
    (param,) = params = [torch.nn.Parameter(torch.zeros(100))]
    optimizer = FusedAdamW(params)
    param.grad = torch.ones(100)
    alive = weakref.ref(param.grad.untyped_storage())
    optimizer.step()
    optimizer.zero_grad()
    assert alive() is None


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("replaced", ["object", "data"])
def test_a_state_that_was_moved_is_found(replaced, kept):
    pieces, twin = Pieces(4), Pieces(4)
    optimizer, reference = FusedAdamW(pieces.params), FusedAdamW(twin.params)
    old = []
    for seed in range(3):
        pieces.fill(seed)
        twin.fill(seed)
        optimizer.step()
        reference.step()
        state = optimizer.state[pieces.params[1]]
        if kept:
            old.append(state["exp_avg"])
        if replaced == "object":
            state["exp_avg"] = state["exp_avg"].clone()
        else:
            state["exp_avg"].data = state["exp_avg"].clone()
    assert torch.equal(pieces.flat, twin.flat)


def test_a_parameter_that_was_moved_is_found():
    pieces, twin = Pieces(4), Pieces(4)
    optimizer, reference = FusedAdamW(pieces.params), FusedAdamW(twin.params)
    for seed in range(4):
        pieces.fill(seed)
        twin.fill(seed)
        optimizer.step()
        reference.step()
        moved = pieces.params[seed]
        moved.data = moved.detach().clone()
    assert torch.equal(torch.cat(pieces.params), twin.flat)


@pytest.mark.parametrize("master_weights", [None, "fp32"])
def test_what_moves_elsewhere_leaves_no_memory_behind(master_weights):
    params = [torch.nn.Parameter(torch.zeros(100, dtype=torch.bfloat16)) for _ in range(3)]
    optimizer = FusedAdamW(params, master_weights=master_weights)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    left = [weakref.ref(param.untyped_storage()) for param in params]
    for state in optimizer.state.values():
        for name, value in state.items():
            if name != "step":
                left.append(weakref.ref(value.untyped_storage()))
            state[name] = value.clone()
    for param in params:
        param.data = param.data.clone()
    del param, value
    assert [reference().nbytes() for reference in left if reference() is not None] == []


def test_more_elements_than_a_32_bit_index_has():
    numel = 2**31 + 8
    param = torch.empty(numel, dtype=torch.bfloat16, device="meta")
    (state,) = create([param], Precision("fp32", "block8", "block8"), amsgrad=False)
    run = run_of(param, state["step"], states_here(state))
    parts = run.cut(2**30)
    assert [part.numel for part in parts] == [2**30, 2**30, 8]
    assert [part.states.exp_avg_scale.numel() for part in parts] == [2**24, 2**24, 1]
    assert parts[2].states.master.storage_offset() == 2**31
    assert blocks(numel) == 2**25 + 1
    pieces = TorchStep([run], torch.bfloat16)._pieces
    assert sum(piece.run.numel for piece in pieces) == numel
    assert pieces[-1].start == 2**31
