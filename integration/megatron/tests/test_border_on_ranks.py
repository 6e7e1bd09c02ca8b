"""What is plugged beside torch's Adam, and what is refused by name."""

import pickle
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from stepstack_fused_adam import FusedAdam, FusedAdamW
from stepstack_megatron import plug
from stepstack_testing import HostSyncs, on_ranks

pytestmark = pytest.mark.engine


def made(megatron, *, distributed=False, dtype=torch.float32, **options):
    torch.manual_seed(0)
    module = torch.nn.Linear(8, 5)
    chunk = megatron.wrapped(module, dtype=dtype, distributed=distributed)
    return module, chunk, megatron.optimizer(chunk, dtype=dtype, distributed=distributed, **options)


def step(megatron, module, chunk, optimizer, number):
    generator = torch.Generator().manual_seed(number)
    grads = {name: torch.randn(param.shape, generator=generator) for name, param in module.named_parameters()}
    megatron.backward(chunk, optimizer, grads)
    with HostSyncs() as syncs:
        return optimizer.step(), list(syncs)


class LibraryAdam(torch.optim.Optimizer):
    """As FusedAdam of Transformer Engine and Apex: no count in the states, but one in each group that has stepped."""

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        adam_w_mode=True,
        bias_correction=True,
        capturable=False,
    ):
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = int(adam_w_mode)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
                count = torch.tensor(float(group["step"] - 1))
                make = torch.optim.AdamW if self.adam_w_mode else torch.optim.Adam
                numbers = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
                one = make([param.detach()], **numbers)
                alias = one.param_groups[0]["params"][0]
                alias.grad = param.grad
                one.state[alias] = {"step": count, **state}
                one.step()


LibraryAdam.__name__ = "FusedAdam"
LibraryAdam.__module__ = "transformer_engine.pytorch.optimizers.fused_adam"


@contextmanager
def beside_a_library(megatron):
    """Megatron as it is where there is Transformer Engine, as far as its optimizers ask."""
    factory = megatron.core.optimizer
    with (
        mock.patch.multiple(factory, Adam=LibraryAdam, USING_PYTORCH_OPTIMIZER=False),
        mock.patch.multiple(factory.distrib_optimizer, Adam=LibraryAdam, HAVE_APEX_OR_TE=True, USING_TE_OPTIMIZER=True),
    ):
        yield


@pytest.mark.parametrize("decoupled", [True, False], ids=["decoupled decay", "L2"])
def test_the_adam_of_a_library_is_replaced_and_its_checkpoints_load_both_ways(engine, tmp_path, decoupled):
    def run(rank):
        results = []
        with engine() as megatron, beside_a_library(megatron):
            for distributed in (False, True):
                options = {"decoupled_weight_decay": decoupled, "distributed": distributed}
                trainings = [made(megatron, **options) for _ in range(4)]
                own, plugged, from_own, from_plugged = trainings
                for training in (plugged, from_own):
                    plug(training[2])
                assert type(plugged[2].optimizer) is (FusedAdamW if decoupled else FusedAdam)
                assert type(own[2].optimizer) is LibraryAdam
                for number in range(3):
                    step(megatron, *own, number)
                    step(megatron, *plugged, number)
                for source, target in ((own, from_own), (plugged, from_plugged)):
                    state_dict = pickle.loads(pickle.dumps(source[2].state_dict()))
                    groups = state_dict["optimizer" if distributed else "param_groups"]
                    assert all(group["step"] == 3 for group in (groups["param_groups"] if distributed else groups))
                    target[0].load_state_dict(source[0].state_dict())
                    target[2].load_state_dict(state_dict)
                    if distributed:
                        source[2].save_parameter_state(str(tmp_path / "state"))
                        torch.distributed.barrier()
                        with torch.no_grad():  # Megatron's own writes into views of leaves
                            target[2].load_parameter_state(str(tmp_path / "state"))
                        torch.distributed.barrier()
                for training in trainings:
                    step(megatron, *training, 3)
                results.append([[param.detach() for param in training[0].parameters()] for training in trainings])
        return results

    for results in on_ranks(2, run, timeout=60):
        for expected, *others in results:
            for weights in others:
                torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-6)


def test_what_is_removed_from_a_library_has_its_counts_in_the_groups_again(engine):
    def run(rank):
        with engine() as megatron, beside_a_library(megatron):
            trainings = [made(megatron) for _ in range(2)]
            plugged = plug(trainings[1][2])
            for number in range(3):
                for training in trainings:
                    step(megatron, *training, number)
            plugged.remove()
            assert [group["step"] for group in trainings[1][2].param_groups] == [3, 3]
            for training in trainings:
                step(megatron, *training, 3)
            return [[param.detach() for param in training[0].parameters()] for training in trainings]

    own, removed = on_ranks(1, run, timeout=60)[0]
    torch.testing.assert_close(removed, own, rtol=1e-6, atol=1e-6)


def test_another_inner_optimizer_stays_and_waits_once_to_know_whether_to_step(engine):
    def run(rank):
        with engine() as megatron:
            trainings = [made(megatron, optimizer="sgd") for _ in range(2)]
            plug(trainings[1][2])
            inner = trainings[1][2].optimizer
            assert type(inner) is torch.optim.SGD
            for number in range(3):
                step(megatron, *trainings[0], number)
                (success, _, _), waits = step(megatron, *trainings[1], number)
                assert success
                assert waits == ["aten._local_scalar_dense"]
            before = [param.detach().clone() for param in trainings[1][0].parameters()]
            megatron.backward(*trainings[1][1:], {"weight": torch.full((5, 8), torch.nan)})
            assert not trainings[1][2].step()[0]
            after = [param.detach().clone() for param in trainings[1][0].parameters()]
            return before, after, [param.detach() for param in trainings[0][0].parameters()]

    before, after, own = on_ranks(1, run, timeout=60)[0]
    assert all(map(torch.equal, before, after))
    torch.testing.assert_close(after, own, rtol=1e-6, atol=1e-6)


def test_a_pipeline_stage_without_anything_to_train_takes_part(engine):
    def run(rank):
        with engine(pp=2) as megatron:
            results = []
            for distributed, dtype in ((False, torch.float32), (False, torch.bfloat16), (True, torch.float32)):
                module = torch.nn.Linear(8, 5)
                module.requires_grad_(rank == 0)
                chunk = megatron.wrapped(module, dtype=dtype, distributed=distributed)
                optimizer = megatron.optimizer(chunk, dtype=dtype, distributed=distributed)
                plug(optimizer)
                if rank == 0:
                    megatron.backward(chunk, optimizer, {"weight": torch.ones(5, 8), "bias": torch.zeros(5)})
                success, norm, zeros = optimizer.step()
                results.append((bool(success), norm.item(), zeros.item()))
            return results

    for results in on_ranks(2, run, timeout=60):
        assert results == [(True, pytest.approx(40**0.5), 5)] * 3


def test_parameters_of_torchs_fsdp_are_measured_over_their_mesh(engine):
    grad = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))

    def run(rank):
        with engine() as megatron:
            module = torch.nn.Linear(8, 6, bias=False)
            torch.distributed.fsdp.fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
            factory = megatron.core.optimizer
            config = factory.OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1.0, log_num_zeros_in_grad=True)
            optimizer = factory.FP32Optimizer(torch.optim.AdamW(module.parameters()), config, lambda inner: None)
            optimizer.tp_group = megatron.parallel_state.get_tensor_model_parallel_group()
            plug(optimizer)
            param = module.weight
            param.grad = distribute_tensor(grad, param.device_mesh, param.placements)
            success, norm, zeros = optimizer.step()
            return bool(success), norm.item(), zeros.item()

    assert on_ranks(2, run, timeout=60) == [(True, pytest.approx(grad.norm().item(), rel=1e-6), 0)] * 2


def test_what_is_not_handled_is_refused_by_name_and_nothing_has_changed(engine):
    def refusal(optimizer, kind):
        members = getattr(optimizer, "chained_optimizers", [])
        before = [dict(vars(thing)) for thing in (optimizer, *members)]
        with pytest.raises(kind) as caught:
            plug(optimizer)
        assert [dict(vars(thing)) for thing in (optimizer, *members)] == before
        return str(caught.value)

    def run(rank):
        with engine() as megatron:
            _, _, optimizer = made(megatron)
            (member,) = optimizer.chained_optimizers
            said = [refusal(optimizer.optimizer, TypeError)]
            subclass = type("Custom", (type(member),), {})
            said.append(refusal(subclass(member.optimizer, member.config, member.init_state_fn), TypeError))
            said.append(refusal(type(optimizer)([]), ValueError))
            with mock.patch.object(megatron.core, "__version__", "0.19.2+1a2b3c4"), plug(optimizer):
                pass  # a version that is handled, with the commit of a checkout
            with mock.patch.object(megatron.core, "__version__", "0.20.0"):
                said.append(refusal(optimizer, RuntimeError))
            for option in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
                with mock.patch.object(member.config, option, True):
                    said.append(refusal(optimizer, ValueError))
            with mock.patch.object(member.config, "optimizer_cuda_graph", True, create=True):
                said.append(refusal(optimizer, ValueError))
            with mock.patch.object(member.get_parameters()[0], "grad_norm_group", "mtp", create=True):
                said.append(refusal(optimizer, ValueError))
            _, _, distributed = made(megatron, distributed=True)
            with mock.patch.object(distributed.chained_optimizers[0].ddp_config, "use_megatron_fsdp", True):
                said.append(refusal(distributed, ValueError))
            with plug(optimizer):
                said.append(refusal(optimizer, ValueError))
            with plug(member):
                said.append(refusal(optimizer, ValueError))
            return said

    names = (
        "torch.optim.adamw.AdamW",
        "Custom",
        "no optimizers",
        "megatron-core 0.20.0; this was made for 0.16.1, 0.17.1, 0.18.2, 0.19.2",
        "use_precision_aware_optimizer",
        "optimizer_cpu_offload",
        "optimizer_cuda_graph",
        "grad_norm_group",
        "use_megatron_fsdp",
        "replaced already",
        "replaced already",
    )
    for said, name in zip(on_ranks(1, run, timeout=60)[0], names, strict=True):
        assert name in said
        assert said.startswith("rank 0: ")
