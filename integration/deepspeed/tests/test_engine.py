"""The engine's calls in one process: what they return, count and refuse."""

import argparse
import json

import pytest
import torch
from plain import Net, batch, config, net
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset, TensorDataset

import stepstack_deepspeed
from stepstack_fused_adam import FusedAdamW
from stepstack_testing import HostSyncs


def initialize(values=None, model=None, **options):
    return stepstack_deepspeed.initialize(
        model=model or net(), config=config() if values is None else values, dist_init_required=False, **options
    )


def engine_of(**values):
    return initialize(config(**values))[0]


def train(engine, step=0, times=1):
    """`times` whole steps."""
    for number in range(times):
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(*batch(0, step + number, micro)))
            engine.step()


def test_initialize_gives_what_deepspeeds_does():
    engine, optimizer, dataloader, lr_scheduler = initialize()
    assert engine.optimizer is optimizer
    assert dataloader is lr_scheduler is engine.lr_scheduler is None
    assert isinstance(engine.module, Net)


def test_the_config_may_come_by_other_ways(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config()))
    args = argparse.Namespace(deepspeed_config=str(path))
    assert stepstack_deepspeed.initialize(args, net(), dist_init_required=False)[0].train_batch_size() == 4
    engine, *_ = stepstack_deepspeed.initialize(model=net(), config_params=config(), dist_init_required=False)
    assert engine.train_batch_size() == 4
    for given in ({}, {"config": config(), "config_params": config()}):
        with pytest.raises(ValueError, match=f"it is given {len(given)} times"):
            stepstack_deepspeed.initialize(model=net(), dist_init_required=False, **given)


def test_the_engine_says_what_the_config_said():
    engine = engine_of(stage=2, dtype="fp16", clip=0.5, accumulation=3)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (12, 4)
    assert engine.gradient_accumulation_steps() == 3
    assert (engine.gradient_clipping(), engine.zero_optimization_stage()) == (0.5, 2)
    assert (engine.fp16_enabled(), engine.bfloat16_enabled(), engine.loss_scale()) == (True, False, 256)
    assert engine_of().loss_scale() == 1


def test_a_step_counts_and_only_that_at_the_end_of_an_accumulation_steps():
    engine = engine_of(accumulation=2)
    before = [param.detach().clone() for param in engine.module.parameters()]
    assert engine.get_global_grad_norm() is None
    assert not engine.is_gradient_accumulation_boundary()
    engine.backward(engine(*batch(0, 0)))
    engine.step()
    assert (engine.micro_steps, engine.global_steps, engine.was_step_applied()) == (1, 0, False)
    assert all(map(torch.equal, before, engine.module.parameters()))
    assert engine.is_gradient_accumulation_boundary()
    engine.backward(engine(*batch(0, 1)))
    engine.step()
    assert (engine.micro_steps, engine.global_steps, engine.was_step_applied()) == (2, 1, True)
    assert (engine.global_samples, engine.skipped_steps) == (8, 0)
    assert not any(map(torch.equal, before, engine.module.parameters()))


def test_the_norm_is_a_tensor_of_one_number_before_clipping_and_without_the_loss_scale():
    norms = []
    for values in ({"clip": 1e-3}, {"clip": 0.0}, {"clip": 1e-3, "dtype": "fp16"}):
        engine = engine_of(**values)
        train(engine)
        norm = engine.get_global_grad_norm()
        assert (norm.dtype, norm.shape) == (torch.float32, ())
        norms.append(norm.item())
    assert norms[0] == norms[1] == pytest.approx(norms[2], rel=1e-3)
    assert norms[0] > 1


def test_backward_gives_the_loss_divided_by_the_accumulation_steps():
    engine = engine_of(accumulation=4, dtype="fp16")
    loss = engine(*batch(0, 0))
    assert engine.backward(loss, retain_graph=True).item() == loss.item() / 4
    assert engine.backward(loss, scale_wrt_gas=False).item() == loss.item()
    with pytest.raises(TypeError, match="loss must be a tensor of one number, got"):
        engine.backward(torch.ones(2))


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_loop_may_call_backward_itself_on_the_scaled_loss(dtype):
    engines = [engine_of(dtype=dtype, accumulation=2) for _ in range(2)]
    train(engines[0])
    for micro in range(2):
        engines[1].scale(engines[1](*batch(0, 0, micro))).backward()
        engines[1].step()
    assert engines[1].get_global_grad_norm() == engines[0].get_global_grad_norm()


def test_a_step_without_a_backward_of_the_engine_is_refused():
    engine = engine_of()
    engine(*batch(0, 0)).backward()
    with pytest.raises(RuntimeError, match=r"gradients of loss.backward\(\) lack the loss scale"):
        engine.step()
    engine.zero_grad()
    train(engine)
    with pytest.raises(RuntimeError, match="without a backward"):
        engine.step()


def test_zero_grad_forgets():
    engines = [engine_of(stage=stage) for stage in (1, 1, 2, 2)]
    for engine in engines[1::2]:
        engine.backward(engine(*batch(0, 7)))
        engine.zero_grad()
    for engine in engines:
        train(engine)
    assert len({engine.get_global_grad_norm().item() for engine in engines}) == 1


def test_the_boundary_may_be_set():
    counted, told = engine_of(accumulation=3), engine_of(accumulation=3)
    train(counted)
    for micro in range(3):
        told.set_gradient_accumulation_boundary(micro == 2)
        assert told.is_gradient_accumulation_boundary() == (micro == 2)
        told.backward(told(*batch(0, 0, micro)))
    told.step()
    assert told.get_global_grad_norm() == counted.get_global_grad_norm()
    assert (told.micro_steps, told.global_steps) == (1, 1)


def test_without_managed_accumulation_every_step_is_one():
    counted, told = engine_of(accumulation=2), engine_of(accumulation=2, managed_gradient_accumulation=False)
    train(counted)
    for micro in range(2):
        assert not told.is_gradient_accumulation_boundary()
        told.backward(told(*batch(0, 0, micro)))
    told.step()
    assert told.get_global_grad_norm() == counted.get_global_grad_norm()
    assert told.was_step_applied()
    with pytest.raises(RuntimeError, match=r"every step\(\) is a boundary"):
        told.set_gradient_accumulation_boundary(True)


def test_no_sync_is_not_for_steps_nor_for_gradients_in_shares():
    engine = engine_of()
    with engine.no_sync(), pytest.raises(RuntimeError, match=r"step\(\) inside of no_sync\(\)"):
        engine.step()
    with (
        pytest.raises(RuntimeError, match=r"no_sync\(\) in stage 2: there each rank keeps its share"),
        engine_of(stage=2).no_sync(),
    ):
        pass
    with engine.no_sync(), pytest.raises(RuntimeError, match="inside of no_sync"), engine.no_sync():
        pass


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing_but_the_loss_scale(dtype, value):
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}}
    engine = engine_of(dtype=dtype, scheduler=scheduler)
    train(engine, times=3)
    before = [param.detach().clone() for param in engine.module.parameters()]
    lr, scale = engine.get_lr(), engine.loss_scale()
    for skipped in (1, 2):
        engine.backward(engine(*batch(0, 3)) * value)
        engine.step()
        assert not engine.was_step_applied()
        assert not engine.get_global_grad_norm().isfinite()
        assert (engine.global_steps, engine.skipped_steps) == (3 + skipped, skipped)
    assert all(map(torch.equal, before, engine.module.parameters()))
    assert engine.get_lr() == lr
    assert engine.loss_scale() == (scale / 2 if dtype == "fp16" else 1)  # the second of a hysteresis of 2
    train(engine)
    assert engine.was_step_applied()
    assert engine.get_lr() != lr


def test_a_step_at_which_the_loss_scale_grows_is_like_any_other():
    growing, fixed = (
        engine_of(dtype="fp16", fp16={"enabled": True, "initial_scale_power": 4, **rule})
        for rule in ({"loss_scale_window": 1}, {"loss_scale_window": 1000})
    )
    for step in range(4):
        train(growing, step)
        train(fixed, step)
        assert growing.get_global_grad_norm() == fixed.get_global_grad_norm()
    assert growing.loss_scale() > fixed.loss_scale()
    assert all(map(torch.equal, growing.module.parameters(), fixed.module.parameters()))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_nothing_waits_for_the_device(stage, dtype):
    scheduler = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "total_num_steps": 9}}
    engine = engine_of(stage=stage, dtype=dtype, accumulation=2, scheduler=scheduler)
    train(engine)
    with HostSyncs() as syncs:
        train(engine, step=1, times=2)
        engine.get_global_grad_norm()
    assert syncs == [], syncs.where


def test_with_a_scheduler_of_torch_nothing_waits_either():
    engine, optimizer, _, lr_scheduler = initialize(
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step))
    )
    assert isinstance(lr_scheduler, LambdaLR)
    assert lr_scheduler.optimizer is optimizer
    train(engine)
    with HostSyncs() as syncs:
        train(engine, step=1)
    assert syncs == [], syncs.where
    assert engine.get_lr() == lr_scheduler.get_last_lr() == [pytest.approx(2e-3 / 3)]


def test_a_skipped_step_holds_a_scheduler_of_torch():
    engine, _, _, lr_scheduler = initialize(
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step))
    )
    engine.backward(engine(*batch(0, 0)) * float("nan"))
    engine.step()
    assert lr_scheduler.get_last_lr() == [pytest.approx(2e-3)]
    train(engine)
    assert lr_scheduler.get_last_lr() == [pytest.approx(1e-3)]


def given_optimizers():
    return {
        "FusedAdamW": lambda params: FusedAdamW(params, lr=1e-2, weight_decay=0.5, bias_correction=False),
        "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.5, fused=True),
        "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.5),
        "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
    }


@pytest.mark.parametrize("name", given_optimizers())
def test_an_optimizer_of_the_callers_steps_as_it_would_alone(name):
    make, alone, model = given_optimizers()[name], net(), net()
    groups = [{"params": list(alone.parameters())[:3], "lr": 1e-3}, {"params": list(alone.parameters())[3:]}]
    reference = make(groups)
    given = make([{"params": list(model.parameters())[:3], "lr": 1e-3}, {"params": list(model.parameters())[3:]}])
    engine, optimizer, *_ = initialize(config(clip=0), model, optimizer=given)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1e-2]
    for step in range(3):
        train(engine, step)
        alone(*batch(0, step)).backward()
        reference.step()
        reference.zero_grad()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_an_optimizer_may_be_a_class_or_a_function():
    for optimizer in (torch.optim.AdamW, lambda params: FusedAdamW(params, lr=0.5)):
        engine, *_ = initialize(optimizer=optimizer)
        train(engine)
        assert engine.was_step_applied()


def test_a_scheduler_of_the_callers_optimizer_goes_on_with_the_engines():
    model = net()
    optimizer = FusedAdamW(model.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    engine, *_ = initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler)
    rates = []
    for step in range(3):
        rates += engine.get_lr()
        train(engine, step)
    assert rates == [1, 0.5, 0.25]


def spread_by_deepspeed():
    model = net()
    model.first.weight.ds_id = 0
    return model


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"optimizer": 3}, TypeError, "optimizer must be a torch.optim.Optimizer, or a class or function.* got int"),
        ({"optimizer": lambda params: 3}, TypeError, "must make a torch.optim.Optimizer; it made 3"),
        ({"optimizer": FusedAdamW(Net().parameters())}, ValueError, r"shape \(29, 31\) to be trained is not one of"),
        ({"model_parameters": []}, ValueError, "model_parameters is empty"),
        ({"model": Net().requires_grad_(False)}, ValueError, "nothing to train: no parameter of the model requires"),
        ({"model_parameters": [{"lr": 1}]}, TypeError, "a parameter group must be a dict with 'params'"),
        ({"model": Net().to("meta")}, ValueError, "'first.weight' of the model is on the meta device, without values"),
        ({"model": spread_by_deepspeed()}, ValueError, "'first.weight' of the model has been spread .* zero.Init"),
        ({"model": 3}, TypeError, "model must be a torch.nn.Module, got int"),
        ({"mpu": object()}, ValueError, "mpu is given: all ranks hold the same model"),
        ({"lr_scheduler": 3}, TypeError, "lr_scheduler must be a scheduler of torch"),
    ],
)
def test_a_bad_argument_is_refused_by_name(options, error, words):
    with pytest.raises(error, match=words):
        initialize(**options)


def test_an_optimizer_that_has_stepped_is_refused():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(*batch(0, 0)).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="the optimizer has made steps"):
        initialize(model=model, optimizer=optimizer)


def test_an_optimizer_is_of_one_engine():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    initialize(model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match="another engine has taken them over"):
        initialize(model=model, optimizer=optimizer)


def test_there_must_be_an_optimizer():
    values = config()
    del values["optimizer"]
    with pytest.raises(ValueError, match="there is no optimizer: give one, or say"):
        initialize(values)


def test_stage_3_needs_a_process_group():
    with pytest.raises(ValueError, match="stage 3 needs a process group"):
        initialize(config(stage=3))


def test_only_what_is_given_is_trained():
    model = net()
    engine, optimizer, *_ = initialize(
        model=model,
        model_parameters=[
            {"params": model.first.parameters(), "lr": 0.5},
            {"params": [], "lr": 1.0},
            {"params": [model.last.weight], "weight_decay": 0.0},
        ],
    )
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    train(engine)
    changed = {name for name, param in model.named_parameters() if not torch.equal(param, before[name])}
    assert changed == {"first.weight", "first.bias", "last.weight"}
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 2e-3]


def test_weights_are_rounded_and_buffers_are_not():
    model = net()
    model.register_buffer("table", torch.ones(3))
    engine, *_ = initialize(config(dtype="bf16"), model)
    assert {param.dtype for param in engine.module.parameters()} == {torch.bfloat16}
    assert engine.module.table.dtype == torch.float32


def test_what_the_engine_lacks_is_looked_up_in_the_module():
    model = net()
    model.register_buffer("table", torch.ones(3))
    engine, *_ = initialize(model=model)
    assert engine.table is model.table
    assert engine.blocks is model.blocks
    with pytest.raises(AttributeError, match="neither the engine nor its module, of class Net, has 'nothing_here'"):
        _ = engine.nothing_here
    engine.eval()
    assert not model.training
    engine.train()
    assert model.training


def test_a_loader_gives_micro_batches_of_this_ranks_share():
    data = TensorDataset(torch.arange(22).float())
    _, _, dataloader, _ = initialize(training_data=data)
    batches = [x for (x,) in dataloader]
    assert [len(x) for x in batches] == [4, 4, 4, 4, 4, 2]
    assert torch.cat(batches).sort().values.tolist() == list(range(22))
    _, _, dataloader, _ = initialize(
        config(dataloader_drop_last=True), training_data=data, collate_fn=lambda samples: len(samples)
    )
    assert list(dataloader) == [4] * 5


def test_an_iterable_data_set_is_taken_as_it_is():
    class Numbers(IterableDataset):
        def __iter__(self):
            return iter(range(6))

    _, _, dataloader, _ = initialize(training_data=Numbers())
    assert [x.tolist() for x in dataloader] == [[0, 1, 2, 3], [4, 5]]


def test_arguments_for_the_scheduler_are_refused():
    engine = engine_of()
    with pytest.raises(ValueError, match="lr_kwargs is"):
        engine.step(lr_kwargs={"epoch": 1})


def test_a_lone_process_becomes_a_group_of_one(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    engine, *_ = stepstack_deepspeed.initialize(model=net(), config=config(stage=3))
    try:
        train(engine)
        assert engine.was_step_applied()
        assert isinstance(engine.module, nn.Module)
    finally:
        torch.distributed.destroy_process_group()
