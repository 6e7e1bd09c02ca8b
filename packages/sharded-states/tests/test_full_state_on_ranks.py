"""Whole states on the CPU, and back."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import on_ranks

MESHES = {"1": (1,), "3": (3,), "2x2": (2, 2)}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.linear = nn.Linear(9, 7, bias=False)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def groups(self):
        named = list(self.named_parameters())
        return [
            {"params": [(n, p) for n, p in named if p.ndim > 1], "weight_decay": 0.1},
            {"params": [(n, p) for n, p in named if p.ndim <= 1], "weight_decay": 0.0, "lr": 0.05},
        ]


def step(model, optimizer, times=2):
    for _ in range(times):
        sum((p.pow(2) * (i + 1)).sum() for i, p in enumerate(model.parameters()) if p.requires_grad).backward()
        optimizer.step()
        optimizer.zero_grad()


def make(mesh, **options):
    model = Model()
    options = {"lr": 0.1, "fused": True, "bucket_cap_mb": 0.0005} | options
    return model, ShardedOptimizer(
        model.groups(), torch.optim.AdamW, mesh=init_device_mesh("cpu", MESHES[mesh]), **options
    )


def alone():
    model = Model()
    optimizer = torch.optim.AdamW(model.groups(), lr=0.1, fused=True)
    step(model, optimizer)
    return model, optimizer


def test_the_whole_is_what_one_process_has_and_loads_there():
    def check(rank, mesh):
        model, optimizer = make(mesh)
        step(model, optimizer)
        return optimizer.full_state_dict(), optimizer.full_state_dict(rank0_only=False)

    _, reference = alone()
    for mesh, shape in MESHES.items():
        results = on_ranks(torch.Size(shape).numel(), check, mesh)
        assert [bool(on_first) for on_first, _ in results] == [rank == 0 for rank in range(len(results))]
        for whole in (results[0][0], *(everywhere for _, everywhere in results)):
            torch.testing.assert_close(whole["state"], reference.state_dict()["state"], rtol=0, atol=1e-6)
            assert all(value.is_contiguous() for state in whole["state"].values() for value in state.values())
        _, plain = alone()
        plain.load_state_dict(results[0][0])
        assert plain.param_groups[1]["lr"] == 0.05
        torch.testing.assert_close(plain.state_dict()["state"], reference.state_dict()["state"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("names", [True, False], ids=["by name", "by number"])
@pytest.mark.parametrize("on_all", [True, False], ids=["given to all", "given to rank 0"])
def test_whole_states_are_spread_again(names, on_all):
    _, reference = alone()
    whole = reference.state_dict()
    if names:
        all_names = [name for group in whole["param_groups"] for name in group["param_names"]]
        whole["state"] = {all_names[number]: state for number, state in whole["state"].items()}
        for group in whole["param_groups"]:
            group["params"] = group.pop("param_names")
    whole["param_groups"][0]["lr"] = 0.7

    def check(rank):
        model, optimizer = make("2x2")
        optimizer.load_full_state_dict(whole if on_all or rank == 0 else None)
        before = [p.detach().clone() for p in model.parameters()]
        everywhere = optimizer.full_state_dict(rank0_only=False)
        assert optimizer.param_groups[0]["lr"] == 0.7
        assert all(torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True))
        return everywhere

    for result in on_ranks(4, check):
        torch.testing.assert_close(result["state"], reference.state_dict()["state"], rtol=0, atol=0)


def test_masters_go_along_and_parameters_follow_them():
    def check(rank):
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(40, 9).bfloat16())
        optimizer = ShardedOptimizer([("w", w)], torch.optim.AdamW, lr=0.01, fused=True, inner_dtype=torch.float32)
        (w.pow(2)).sum().backward()
        optimizer.step()
        whole = optimizer.full_state_dict(rank0_only=False)
        with torch.no_grad():
            w.zero_()  # as if the model had been loaded wrongly
        optimizer.load_full_state_dict(whole)
        assert torch.equal(w, whole["state"][0]["master_weight"].bfloat16())
        again = optimizer.full_state_dict(rank0_only=False)
        torch.testing.assert_close(again["state"], whole["state"], rtol=0, atol=0)
        del whole["state"][0]["master_weight"]
        with torch.no_grad():
            w.fill_(0.5)
        optimizer.load_full_state_dict(whole)
        again = optimizer.full_state_dict(rank0_only=False)["state"][0]
        assert torch.equal(again["master_weight"], torch.full((40, 9), 0.5))
        assert torch.equal(again["exp_avg"], whole["state"][0]["exp_avg"])

    on_ranks(3, check)


def test_what_does_not_fit_is_refused_everywhere_and_changes_nothing():
    _, reference = alone()

    def spoilt(how):
        whole = reference.state_dict()
        how(whole)
        return whole

    cases = {
        "has shape (1, 2), the parameter (8, 3, 3, 3)": lambda w: w["state"][0].update(exp_avg=torch.ones(1, 2)),
        "it has no exp_avg_sq of 'linear.weight'": lambda w: w["state"][1].pop("exp_avg_sq"),
        "its parameter 'other' is not in this optimizer": lambda w: w["param_groups"][0]["param_names"].__setitem__(
            0, "other"
        ),
        "is the mesh's first and has been given no states": lambda w: w.clear(),
    }

    def check(rank):
        model, optimizer = make("3")
        step(model, optimizer)
        before = optimizer.full_state_dict(rank0_only=False)["state"]
        said = []
        for how in cases.values():
            with pytest.raises(ValueError, match="rank 0") as error:
                optimizer.load_full_state_dict(spoilt(how) if rank == 0 else None)
            said.append(str(error.value))
        torch.testing.assert_close(optimizer.full_state_dict(rank0_only=False)["state"], before, rtol=0, atol=0)
        return said

    for said in on_ranks(3, check):
        for expected, words in zip(cases, said, strict=True):
            assert expected in words
