"""`sharded_state_dict(model_sharded_state_dict)`: Megatron-core's functions, or stand-ins of the same signatures."""

import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import nn

from stepstack_nemo import DistributedFusedAdam

FOLDER = "megatron.core.dist_checkpointing"


@dataclass
class ShardedTensor:
    key: str
    data: torch.Tensor


def get_param_id_to_sharded_param_map(model_sharded_state_dict, optim_params_iter):
    keys = {id(tensor.data): tensor.key for tensor in model_sharded_state_dict.values()}
    return {number: keys[id(param)] for number, param in enumerate(optim_params_iter)}


def optim_state_to_sharding_state(optim_state_dict, id_to_sharded_param_map):
    for number, entry in optim_state_dict["state"].items():
        for name, value in entry.items():
            entry[name] = ShardedTensor(f"optimizer.state.{name}.{id_to_sharded_param_map[number]}", value)


def dict_list_map_inplace(function, tree):
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        tree[key] = dict_list_map_inplace(function, value) if isinstance(value, dict | list) else function(value)
    return tree


@pytest.fixture
def megatron(monkeypatch):
    for name, contents in {
        "mapping": [ShardedTensor],
        "dict_utils": [dict_list_map_inplace],
        "optimizer": [get_param_id_to_sharded_param_map, optim_state_to_sharding_state],
    }.items():
        module = ModuleType(f"{FOLDER}.{name}")
        for value in contents:
            setattr(module, value.__name__, value)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def trained():
    params = [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(5))]
    optimizer = DistributedFusedAdam(params, lr=0.1)
    params[0].sum().backward()
    optimizer.step()
    sum(p.sum() for p in params).backward()
    optimizer.step()
    return params, optimizer


def test_tensors_have_the_models_keys_and_steps_stay_common(megatron):
    params, optimizer = trained()
    before = optimizer.state_dict()
    model = {name: ShardedTensor(f"model.{name}", param) for name, param in zip("wb", params, strict=True)}
    sharded = optimizer.sharded_state_dict(model, before)
    assert [tensor.key for tensor in sharded["state"][0].values()] == [
        "optimizer.state.fp32_param.model.w",
        "optimizer.state.exp_avg.model.w",
        "optimizer.state.exp_avg_sq.model.w",
    ]
    assert (sharded["format"], sharded["state"]["step"], sharded["state"]["steps"]) == (2, 2, {0: 2, 1: 1})
    assert isinstance(before["state"][0]["exp_avg"], torch.Tensor)  # the caller's is left alone


def test_what_comes_back_is_loaded_with_each_count(megatron):
    params, optimizer = trained()
    model = {name: ShardedTensor(f"model.{name}", param) for name, param in zip("wb", params, strict=True)}
    sharded = optimizer.sharded_state_dict(model)
    for entry in (sharded["state"][0], sharded["state"][1]):
        entry.update({name: tensor.data for name, tensor in entry.items()})
    again = DistributedFusedAdam([nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(5))])
    again.load_state_dict(sharded)
    found, wanted = again.state_dict()["state"], optimizer.state_dict()["state"]
    for number in (0, 1):
        assert found[number]["step"] == wanted[number]["step"]
        for name in ("param", "exp_avg", "exp_avg_sq"):
            assert torch.equal(found[number][name], wanted[number][name])


def test_without_megatron_it_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, f"{FOLDER}.dict_utils", None)
    _, optimizer = trained()
    with pytest.raises(ImportError, match="megatron-core is not installed"):
        optimizer.sharded_state_dict({})


def test_without_arguments_it_is_for_torch_distributed_checkpoint():
    weight = nn.Parameter(torch.ones(4, 3))
    optimizer = DistributedFusedAdam([("weight", weight)])
    weight.sum().backward()
    optimizer.step()
    assert "state.weight.exp_avg" in optimizer.sharded_state_dict()
