"""What scripts ask DeepSpeed's engine, optimizer and scheduler for, beside a training loop."""

import pytest
import torch
from plain import ADAM, batch, config, net
from torch.optim.lr_scheduler import LambdaLR

import stepstack_deepspeed
from stepstack_fused_adam import FusedAdam

FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}


def initialize(values=None, model=None, **options):
    return stepstack_deepspeed.initialize(
        model=model or net(), config=config() if values is None else values, dist_init_required=False, **options
    )


def train(engine, step=0):
    for micro in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(*batch(0, step, micro)))
        engine.step()


def test_the_engine_answers_what_its_config_says():
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}
    values = config(stage=2, dtype="bf16", accumulation=2, scheduler=scheduler, dump_state=False)
    engine = initialize(values)[0]
    assert engine.config == values
    assert engine.get_batch_info() == (8, 4, 2)
    assert (engine.optimizer_name(), engine.optimizer_params()) == ("AdamW", ADAM)
    assert (engine.scheduler_name(), engine.scheduler_params()) == ("WarmupLR", {"warmup_num_steps": 3})
    assert engine.get_data_types() == (torch.bfloat16, torch.bfloat16)
    assert (engine.zero_optimization(), engine.zero_optimization_partition_gradients()) == (True, True)
    assert not engine.zero_optimization_partition_weights()
    assert (engine.steps_per_print(), engine.wall_clock_breakdown(), engine.dump_state()) == (None, False, False)
    assert (engine.dynamic_loss_scale(), engine.initial_dynamic_scale(), engine.fp16_auto_cast()) == (False, 1, False)
    assert (engine.dp_world_size, engine.mp_world_size, engine.local_rank) == (1, 1, 0)
    assert engine.get_mom() == [ADAM["betas"]]
    assert engine.managed_gradient_accumulation()


def test_the_batch_may_grow_between_steps():
    engine, counted = initialize()[0], initialize(config(accumulation=3))[0]
    train(engine)
    train(counted)
    engine.set_train_batch_size(12)
    assert engine.gradient_accumulation_steps() == 3
    train(engine, 1)
    assert engine.global_samples == 16
    with pytest.raises(ValueError, match=r"train_batch_size 13 is not a multiple of .* 4 \* 1 = 4"):
        engine.set_train_batch_size(13)
    engine.backward(engine(*batch(0, 2)))
    with pytest.raises(RuntimeError, match=r"set_train_batch_size\(\) after 1 backwards"):
        engine.set_train_batch_size(4)
    engine.set_train_micro_batch_size(2)
    assert engine.get_batch_info() == (6, 2, 3)


def test_without_managed_accumulation_samples_are_those_of_the_backwards():
    engine = initialize(config(accumulation=2, managed_gradient_accumulation=False))[0]
    for backwards in (1, 3):
        for micro in range(backwards):
            engine.backward(engine(*batch(0, 0, micro)))
        engine.step()
    assert engine.global_samples == 4 * (1 + 3)


def test_the_optimizer_tells_of_the_loss_scale():
    engine, optimizer, *_ = initialize(config(fp16=FP16))
    assert (optimizer.loss_scale, optimizer.cur_scale, optimizer.loss_scaler.cur_scale) == (256, 256, 256)
    assert (optimizer.dynamic_loss_scale, optimizer.loss_scaler.scale_window) == (True, 2)
    assert (optimizer.loss_scale_config.dynamic_loss_scale, optimizer.loss_scale_config.cur_iter) == (True, 0)
    assert optimizer.optimizer is optimizer
    assert not optimizer.overflow
    engine.backward(engine(*batch(0, 0)) * float("inf"))
    engine.step()
    assert optimizer.overflow
    assert optimizer.cur_scale == 128
    optimizer.override_loss_scale(64.0)
    assert engine.loss_scale() == 64
    train(engine)
    assert not optimizer.overflow
    fixed = initialize(config(fp16={"enabled": True, "loss_scale": 32}))[1]
    assert (fixed.dynamic_loss_scale, fixed.loss_scale) == (False, 32)
    fixed.override_loss_scale(16.0)
    assert fixed.loss_scale == 16
    plain = initialize()[1]
    assert (plain.dynamic_loss_scale, plain.loss_scale, plain.overflow) == (False, 1, False)
    with pytest.raises(ValueError, match=r"override_loss_scale\(\) without fp16"):
        plain.override_loss_scale(2.0)


def test_the_callers_optimizer_shows_what_is_trained_and_follows_its_edits():
    model = net()
    given = FusedAdam(model.parameters(), lr=1.0)
    engine, optimizer, *_ = initialize(model=model, optimizer=given)
    assert isinstance(given, FusedAdam)
    assert optimizer.optimizer is given
    assert given.param_groups is optimizer.param_groups
    before = [param.detach().clone() for param in model.parameters()]
    given.param_groups[0]["lr"] = 0.0
    train(engine)
    assert all(map(torch.equal, before, model.parameters()))
    assert given.state is optimizer.state
    with pytest.raises(RuntimeError, match=r"would change nothing: call engine.step\(\)"):
        given.step()


def test_in_stage_0_and_fp32_the_callers_optimizer_is_given_back():
    for make in (torch.optim.AdamW, lambda params: FusedAdam(params, lr=1.0)):
        model = net()
        given = make(model.parameters())
        engine, optimizer, *_ = initialize(config(stage=0), model, optimizer=given)
        assert engine.optimizer is optimizer is given
        train(engine)
        assert given.state
        assert given.param_groups[0]["lr"] == engine.get_lr()[0]
        optimizer.zero_grad()
    optimizer = initialize(config(stage=0), optimizer=lambda params: torch.optim.AdamW(params))[1]
    assert isinstance(optimizer, torch.optim.AdamW)


def test_a_scheduler_that_the_loop_moves_reaches_the_engine():
    model = net()
    given = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = LambdaLR(given, lambda step: 0.5**step)
    engine, *_ = initialize(model=model, optimizer=given)
    rates = []
    for step in range(3):
        train(engine, step)
        scheduler.step()
        rates += engine.get_lr()
    assert rates == [0.5, 0.25, 0.125]


def test_the_callers_scheduler_is_given_back_and_moved_by_the_engine_alone():
    model = net()
    given = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = LambdaLR(given, lambda step: 0.5**step)
    engine, _, _, back = initialize(model=model, optimizer=given, lr_scheduler=scheduler)
    assert back is engine.lr_scheduler is scheduler
    train(engine)
    assert scheduler.get_last_lr() == [0.5]
    with pytest.raises(RuntimeError, match="moves the schedule that initialize got"):
        scheduler.step()


def test_what_the_engine_steps_can_not_be_replaced_without_a_word():
    engine = initialize()[0]
    for name in ("module", "optimizer", "lr_scheduler"):
        with pytest.raises(AttributeError, match=f"engine.{name} can't be replaced.*: give it to initialize"):
            setattr(engine, name, getattr(engine, name))
    engine.global_steps = 7
    engine.anything = 3


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("own", [True, False])
def test_weights_that_are_loaded_are_trained_from(dtype, own):
    options = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.0)} if own else {}
    values = config(dtype=dtype, optimizer={"type": "AdamW", "params": {"lr": 0.0}})
    engine = initialize(values, **options)[0]
    train(engine)
    torch.manual_seed(1)
    weights = {name: torch.randn_like(value) for name, value in engine.module.state_dict().items()}
    engine.module.load_state_dict(weights)
    train(engine, 1)
    assert all(torch.equal(value, weights[name]) for name, value in engine.module.state_dict().items())


def test_with_auto_cast_positional_inputs_become_fp16():
    class Takes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, inputs, numbers):
            assert {key: value.dtype for key, value in inputs.items()} == {"x": torch.float16, "i": torch.int64}
            assert numbers[0].dtype == torch.float16
            return (self.weight * inputs["x"]).sum()

    engine = initialize(config(fp16=FP16 | {"auto_cast": True}), Takes())[0]
    engine({"x": torch.ones(2), "i": torch.ones(2, dtype=torch.int64)}, (torch.ones(2), 3))


def test_a_compiled_module_trains_alike():
    engines = [initialize()[0] for _ in range(2)]
    engines[1].compile(backend="eager", compile_kwargs={"dynamic": False})
    assert [engine.is_compiled for engine in engines] == [False, True]
    for engine in engines:
        train(engine)
        engine.destroy()
    assert all(map(torch.equal, *(engine.module.parameters() for engine in engines)))


def test_a_name_of_deepspeeds_that_is_not_here_says_what_to_write():
    engine, optimizer, *_ = initialize()
    for who, name, words in (
        (engine, "monitor", "has 'monitor'. Instead: log the numbers yourself"),
        (engine, "train_batch", "write the loop"),
        (engine, "zero_sub_group_size", "engine.config"),
        (optimizer, "backward", r"Instead: engine.backward\(loss\)"),
        (stepstack_deepspeed, "zero", "zero.Init: nothing"),
        (stepstack_deepspeed, "init_distributed", "nothing, initialize does it"),
    ):
        with pytest.raises(AttributeError, match=words):
            getattr(who, name)
    engine.module.monitor = 3  # the module's own come first, as in DeepSpeed
    assert engine.monitor == 3
