"""`initialize`: from a model and a config to an engine."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from stepstack import OptimizerStep
from stepstack_deepspeed import _optimizers, _schedules
from stepstack_deepspeed._config import Config, read_config
from stepstack_deepspeed._curves import Curve
from stepstack_deepspeed._engine import Engine
from stepstack_deepspeed._optimizers import Inner
from stepstack_deepspeed._parameters import Groups, convert_, groups_of, groups_of_optimizer
from stepstack_deepspeed._precision import constant_scale
from stepstack_deepspeed._processes import check_alike, join, ranks, this_rank
from stepstack_deepspeed._schedules import ScheduledRates, SteppedScheduler
from stepstack_deepspeed._states import sharded_optimizer
from stepstack_deepspeed._views import hand_over_, name_as_deepspeed_


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    *,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    optimizer: Optimizer | Callable[[list[Any]], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    dist_init_required: bool | None = None,
    mpu: Any = None,
    config_params: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> tuple[Engine, Optimizer, DataLoader[Any] | None, ScheduledRates | LRScheduler | None]:
    """An engine for a model, its optimizer, a loader of the training data and the schedule: `(engine, optimizer,
    dataloader, lr_scheduler)`, the last two None where nothing asks for them. The calls and the config are DeepSpeed's.

    - model: moved to this process's device, and its parameters rounded to bf16 or fp16 if the config enables one. All
      ranks give the same; they start with the first rank's values.
    - config: a dict, or the path of a JSON file. Also found as `config_params` or `args.deepspeed_config`.
    - optimizer: instead of the config's. An optimizer of the model's parameters that has made no step, or a class or
      function that makes one of them. Its class, groups and options are taken over; from then on it shows the groups
      and states of the one given back, which may be edited in either, and can't be stepped.
    - model_parameters: what is trained: parameters or groups, as torch's optimizers take them. None: all of the
      model's that require a gradient.
    - training_data: a data set, of which each rank's loader gives a share, in micro-batches, shuffled anew by
      `dataloader.sampler.set_epoch`; an iterable one is taken as each rank has it. `collate_fn` is the loader's.
    - lr_scheduler: instead of the config's. A torch scheduler of the optimizer given here, or a function that makes one
      of the optimizer given back; it is given back itself. The engine moves it, and no skipped step uses up one of
      its rates.
    - dist_init_required: None and True join the default process group if that was not done; without a launcher it is
      this process alone. False never does.

    Raises ValueError for a config that contradicts itself, asks for what can't be had or differs between ranks, by the
    key's name, and TypeError for arguments of other kinds. Every rank calls this.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if mpu is not None:
        raise ValueError("mpu is given: all ranks hold the same model here, there is no model parallelism")
    without_values = [name for name, param in model.named_parameters() if param.is_meta]
    if without_values:
        raise ValueError(
            f"{without_values[0]!r} of the model is on the meta device, without values: make the model on the CPU, or "
            "call its to_empty() and load a state dict"
        )
    spread = [name for name, param in model.named_parameters() if hasattr(param, "ds_id")]
    if spread:
        raise ValueError(
            f"{spread[0]!r} of the model has been spread over the ranks by DeepSpeed's zero.Init (transformers does so "
            "under an HfDeepSpeedConfig of stage 3): make the model without it, on the CPU"
        )
    device = join(required=dist_init_required)
    of_args = (getattr(args, name, None) for name in ("deepspeed_config", "deepscale_config"))
    read = read_config(_only_one(config, config_params, *of_args), ranks())
    check_alike("the config", read.numbers())
    convert_(model, read.precision.dtype)
    inner, groups, given = _optimizer_and_groups(read, model, optimizer, model_parameters)
    sharded = sharded_optimizer(model, groups, inner, device=device, precision=read.precision, sharding=read.sharding)
    if given is not None:
        given.step()  # of no parameters: a scheduler wants to see its optimizer step
        hand_over_(given, sharded)
    schedule = _schedule(read, lr_scheduler, sharded, given)
    scaler = None
    if read.precision.loss_scale is not None:
        scaler = read.precision.loss_scale.scaler(device.type)
    elif isinstance(schedule, LRScheduler):
        scaler = constant_scale(device.type, 1.0)  # it knows on the device which steps were skipped
    step = OptimizerStep(sharded, max_norm=read.gradient_clipping or None, scaler=scaler)
    # DeepSpeed has no wrapper then: what users gave is what they test for, and find again.
    plain = read.sharding.stage == 0 and not read.precision.is_mixed
    rates: ScheduledRates | SteppedScheduler | None = None
    if isinstance(schedule, Curve):
        rates = ScheduledRates(sharded, schedule, step.applied_steps, on_device=inner.has_flag)
    elif schedule is not None:
        assert scaler is not None
        rates = SteppedScheduler(schedule, scaler, on_device=inner.has_flag)
    dataloader = None if training_data is None else _dataloader(training_data, collate_fn, read, device)
    engine = Engine(
        model,
        sharded,
        step,
        rates,
        config=read,
        device=device,
        training_dataloader=dataloader,
        handed_over=given if plain else None,
    )
    name_as_deepspeed_(engine, given)
    return engine, engine.optimizer, dataloader, engine.lr_scheduler


def _only_one(*configs: Any) -> Any:
    given = [config for config in configs if config is not None]
    if len(given) != 1:
        raise ValueError(
            "give the config once, as a dict or a path: in config, or config_params, or args.deepspeed_config; "
            f"it is given {len(given)} times"
        )
    return given[0]


def _optimizer_and_groups(
    config: Config, model: nn.Module, optimizer: Any, params: Iterable[Any] | None
) -> tuple[Inner, Groups, Optimizer | None]:
    """What is to step, and which parameters; also the caller's optimizer, if there is one."""
    if optimizer is None:
        if config.optimizer is None:
            raise ValueError(
                'there is no optimizer: give one, or say "optimizer": {"type": "AdamW"} in the config. A model that is '
                "not trained needs no engine; torch's fully_shard spreads its parameters"
            )
        return config.optimizer, groups_of(model, params), None
    trained = [param for param in model.parameters() if param.requires_grad] if params is None else list(params)
    given = _optimizers.of_caller(optimizer, trained)
    has_flag = getattr(given, "_step_supports_amp_scaling", False)
    return Inner(_optimizers.like(given), has_flag=has_flag), groups_of_optimizer(model, given), given


def _schedule(
    config: Config, lr_scheduler: Any, optimizer: Optimizer, given: Optimizer | None
) -> Curve | LRScheduler | None:
    if lr_scheduler is None:
        return None if config.schedule is None else config.schedule(optimizer)
    return _schedules.of_caller(lr_scheduler, optimizer, given)


def _dataloader(
    data: Dataset[Any], collate_fn: Callable[[list[Any]], Any] | None, config: Config, device: torch.device
) -> DataLoader[Any]:
    sampler: DistributedSampler[Any] | None = None
    if not isinstance(data, IterableDataset):
        sampler = DistributedSampler(data, ranks(), this_rank(), drop_last=config.drop_last)
    return DataLoader(
        data,
        batch_size=config.batch.micro,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=config.drop_last,
        pin_memory=device.type != "cpu",
    )
