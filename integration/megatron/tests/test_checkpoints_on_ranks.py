"""Checkpoints of Megatron's own optimizer and of a plugged one, each loading into the other."""

import copy

import pytest
import torch

from stepstack_megatron import plug
from stepstack_testing import on_ranks

pytestmark = pytest.mark.engine

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class Training:
    """A small model under one optimizer, plugged or not, whose gradients depend on the number of the step."""

    def __init__(self, megatron, rank, distributed, dtype, *, plugged):
        torch.manual_seed(0)
        self._megatron, self._rank = megatron, rank
        self.module = torch.nn.Sequential(torch.nn.Linear(16, 9), torch.nn.LayerNorm(9))
        self.chunk = megatron.wrapped(self.module, dtype=dtype, distributed=distributed)
        self.optimizer = megatron.optimizer(self.chunk, dtype=dtype, distributed=distributed)
        self.plug = plug(self.optimizer) if plugged else None

    def steps(self, *numbers):
        for number in numbers:
            generator = torch.Generator().manual_seed(10 * number + self._rank)
            grads = {
                name: torch.randn(param.shape, generator=generator) for name, param in self.module.named_parameters()
            }
            self._megatron.backward(self.chunk, self.optimizer, grads)
            assert self.optimizer.step()[0]
        return self

    def weights(self):
        main = [param.detach().clone() for param in self.optimizer.chained_optimizers[0].get_parameters()]
        return main + [param.detach().clone() for param in self.module.parameters()]


def save(training, path=None):
    saved = {"model": training.module.state_dict(), "optimizer": training.optimizer.state_dict()}
    if path is not None:
        training.optimizer.save_parameter_state(path)
    return copy.deepcopy(saved)


def load(training, saved, path=None):
    saved = copy.deepcopy(saved)
    training.module.load_state_dict(saved["model"])
    training.optimizer.load_state_dict(saved["optimizer"])
    if path is not None:
        training.optimizer.load_parameter_state(path)
    return training


@pytest.mark.parametrize("saved_plugged", [True, False], ids=["of a plugged one", "of Megatron's"])
def test_a_checkpoint_goes_on_in_the_other_kind_as_where_it_was_made(engine, saved_plugged):
    def run(rank):
        with engine() as megatron:
            pairs = []
            for dtype in (FP32, BF16, FP16):
                first = Training(megatron, rank, False, dtype, plugged=saved_plugged).steps(0, 1, 2, 3)
                saved = save(first)
                second = load(Training(megatron, rank, False, dtype, plugged=not saved_plugged), saved)
                scales = [float(training.optimizer.get_loss_scale()) for training in (first, second)]
                pairs.append((first.steps(4, 5).weights(), second.steps(4, 5).weights(), scales))
            return pairs

    for first, second, scales in on_ranks(1, run, timeout=60)[0]:
        assert scales[0] == scales[1]
        for one, other in zip(first, second, strict=True):
            torch.testing.assert_close(one, other, rtol=torch.finfo(one.dtype).eps, atol=1e-6)


def test_the_parameter_state_of_either_kind_goes_on_plugged(engine, tmp_path):
    def run(rank):
        with engine() as megatron:
            pairs = []
            for dtype in (FP32, BF16, FP16):
                for saved_plugged in (True, False):
                    first = Training(megatron, rank, True, dtype, plugged=saved_plugged).steps(0, 1, 2, 3)
                    path = str(tmp_path / f"{dtype}-{saved_plugged}")
                    saved = save(first, path)
                    torch.distributed.barrier()
                    second = load(Training(megatron, rank, True, dtype, plugged=True), saved, path)
                    pairs.append((first.steps(4, 5).weights(), second.steps(4, 5).weights()))
            return pairs

    assert_same_on_ranks(run)
    for dtype in (FP32, BF16, FP16):
        ours, theirs = (torch.load(tmp_path / f"{dtype}-{plugged}") for plugged in (True, False))
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs[0][dtype, FP32].items():
            torch.testing.assert_close(ours[0][dtype, FP32][key], tensor, rtol=1e-5, atol=1e-6)


SHARDED = [(False, None), (True, "dp_reshardable"), (True, "fully_reshardable")]


@pytest.mark.parametrize("saved_plugged", [True, False], ids=["of a plugged one", "of Megatron's"])
def test_a_sharded_state_dict_goes_on_in_the_other_kind(engine, saved_plugged):
    """All that lies between the two is what Megatron's files hold: tensors and objects by key, and the rest.

    Megatron itself, without Transformer Engine or Apex, loads none of a DistributedOptimizer rightly: it looks for step
    counts among the tensors, where there are none, or takes its own of before.
    """

    def run(rank):
        with engine() as megatron:
            pairs = []
            for distributed, sharding in SHARDED[:1] if saved_plugged else SHARDED:
                for dtype in (FP32, BF16):
                    first = Training(megatron, rank, distributed, dtype, plugged=saved_plugged).steps(0, 1, 2, 3)
                    saved = sharded(megatron, first, sharding)
                    second = Training(megatron, rank, distributed, dtype, plugged=not saved_plugged)
                    if distributed:
                        second.steps(0)  # without Transformer Engine or Apex, Megatron needs states to load into
                    wanted = sharded(megatron, second, sharding, is_loading=True)
                    load(second, filled(wanted, saved, contents(saved)))
                    pairs.append((first.steps(4, 5).weights(), second.steps(4, 5).weights()))
            return pairs

    assert_same_on_ranks(run)


def assert_same_on_ranks(run):
    """`run` gives pairs of weights, to be the same but for the last place."""
    for pairs in on_ranks(2, run, timeout=60):
        for first, second in pairs:
            for one, other in zip(first, second, strict=True):
                torch.testing.assert_close(one, other, rtol=torch.finfo(one.dtype).eps, atol=1e-6)


def sharded(megatron, training, sharding, *, is_loading=False):
    make = megatron.checkpointing.ShardedTensor.from_rank_offsets
    rank = torch.distributed.get_rank()
    model = {name: make(name, param, replica_id=rank) for name, param in training.module.named_parameters()}
    metadata = {"distrib_optim_sharding_type": sharding} if sharding else {}
    return {
        "model": model,
        "optimizer": training.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata),
    }


def contents(saved):
    """By key and place, what a sharded state dict holds of tensors and objects."""
    if hasattr(saved, "key"):
        data = saved.data
        return {(saved.key, saved.global_offset): data.detach().clone() if isinstance(data, torch.Tensor) else data}
    return {key: value for part in parts(saved).values() for key, value in contents(part).items()}


def filled(wanted, saved, known):
    """What Megatron's reader makes of what is wanted: from the files, of this process alone, or as it was saved."""
    if hasattr(wanted, "key"):
        return known[wanted.key, wanted.global_offset]
    if type(wanted).__name__ == "LocalNonpersistentObject":
        return wanted.unwrap()
    if not isinstance(wanted, dict | list):
        return copy.deepcopy(saved)
    there = parts(saved)
    made = {
        key: filled(part, there.get(key), known) for key, part in parts(wanted).items() if is_read(part, key, there)
    }
    made |= {key: copy.deepcopy(part) for key, part in there.items() if key not in made}
    return made if isinstance(wanted, dict) else list(made.values())


def is_read(wanted, key, saved):
    """Values that nobody saved are not read."""
    return key in saved or hasattr(wanted, "key") or isinstance(wanted, dict | list)


def parts(state):
    if isinstance(state, dict):
        return state
    return dict(enumerate(state)) if isinstance(state, list) else {}
