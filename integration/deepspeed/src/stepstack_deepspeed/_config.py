"""A DeepSpeed config, read and checked: every key of it is used, known to have no effect, or refused."""

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stepstack_deepspeed import _schedules
from stepstack_deepspeed._batch import Batch
from stepstack_deepspeed._curves import Curve
from stepstack_deepspeed._json import loaded
from stepstack_deepspeed._optimizers import Inner
from stepstack_deepspeed._precision import Precision
from stepstack_deepspeed._processes import this_rank
from stepstack_deepspeed._section import Section
from stepstack_deepspeed._sharding import Sharding

log = logging.getLogger("stepstack_deepspeed")

# They print, measure or tidy up, or set up what a model may call, and change no result.
_WITHOUT_EFFECT = (
    "activation_checkpointing",
    "aio",
    "autotuning",
    "comet",
    "comms_config",
    "comms_logger",
    "csv_monitor",
    "cuda_visible_devices",
    "datastates_config",
    "disable_allgather",
    "disable_python_gc",
    "dump_state",
    "flops_profiler",
    "log_level",
    "memory_breakdown",
    "monitor_config",
    "seq_parallel_communication_data_type",
    "steps_per_print",
    "tensorboard",
    "timers",
    "use_data_before_expert_parallelism",
    "vocabulary_size",
    "wall_clock_breakdown",
    "wandb",
)
_OTHER_ENGINES = {
    "data_efficiency": "it changes the data, which is not this engine's work",
    "expert_parallel": "all ranks hold the same model here",
    "hybrid_engine": "this engine trains only",
    "pipeline": "all ranks hold the same model here",
    "torch_autocast": "say bf16 or fp16, or use torch.autocast in the model's forward",
    "weight_quantization": "this engine trains only",
}
# What DeepSpeed itself does not read any more, or not under this name.
_REMOVED = (
    "amp",
    "compression_training",
    "curriculum_learning",
    "eigenvalue",
    "elasticity",
    "graph_harvesting",
    "nebula",
    "progressive_layer_drop",
    "quantize_training",
    "sparse_attention",
    "sparse_gradients",
)
_OF_EACH_RANK = ("optimizer", "schedule", "values")
# Where Hugging Face's Trainer takes what it writes in place of "auto".
_AUTO = {
    "train_batch_size": "per_device_train_batch_size * gradient_accumulation_steps * ranks; may be left out",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "[adam_beta1, adam_beta2]",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_min_lr": "0",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
}


@dataclass(frozen=True)
class Config:
    """What a config says, in the engine's words."""

    batch: Batch
    precision: Precision
    sharding: Sharding
    gradient_clipping: float
    """0 for none."""
    optimizer: Inner | None
    schedule: Callable[[Optimizer], Curve | LRScheduler] | None
    drop_last: bool
    """The last batch of a data set, if it is smaller."""
    managed_accumulation: bool
    """The engine counts the backwards of a step. Otherwise each call of `step` is one of the optimizer."""
    tags_that_differ: str
    """Ranks that save under other tags than the first: ignore, warn or fail."""
    values: Mapping[str, Any] = field(compare=False)
    """The config as it was given."""

    def numbers(self) -> dict[str, str]:
        """What ranks must agree on, but for the optimizer and the schedule, as text."""
        return {key: str(value) for key, value in vars(self).items() if key not in _OF_EACH_RANK}


def read_config(config: Mapping[str, Any] | str | os.PathLike[str], ranks: int) -> Config:
    """Read a dict, or the JSON file of a path, for so many ranks.

    Raises ValueError, by the key's full name, for what can't be had, for what contradicts, and for keys that nobody
    knows, all in one. Warns once of those that have no effect here.
    """
    values = loaded(config)
    _refuse_auto(values)
    section = Section(values)
    precision = Precision.read(section)
    precision.check_reduced_in(section.choice("communication_data_type", None, ("fp32", "bf16", "fp16")))
    sharding = Sharding.read(section, ranks)
    read = Config(
        batch=Batch.read(section, ranks),
        precision=precision,
        sharding=sharding,
        gradient_clipping=_read_clipping(section),
        optimizer=Inner.read(section, steps_dtensors=sharding.stage == 3),
        schedule=_schedules.of_config(section),
        drop_last=section.flag("dataloader_drop_last"),
        managed_accumulation=section.flag("managed_gradient_accumulation", True),
        tags_that_differ=_read_checkpoint(section.section("checkpoint")),
        values=values,
    )
    _look_at_the_rest(section)
    return read


def _read_clipping(section: Section) -> float:
    if "gradient_clipping" not in section and this_rank() == 0:
        log.info("the config does not say gradient_clipping: it is 1.0, as in DeepSpeed since 0.19.3; 0 is no clipping")
    return section.number("gradient_clipping", 1.0, at_least=0)


def _read_checkpoint(checkpoint: Section) -> str:
    checkpoint.without_effect("load_universal", "parallel_write", "use_node_local_storage", as_here=(False,))
    checkpoint.without_effect("checkpoint_serialization", as_here=(True,))
    checkpoint.without_effect("writer")
    said = checkpoint.value("tag_validation", "warn")
    if not isinstance(said, str) or said.lower() not in ("ignore", "warn", "fail"):
        raise ValueError(f"{checkpoint.name('tag_validation')} must be Ignore, Warn or Fail, got {said!r}")
    return said.lower()


def _look_at_the_rest(section: Section) -> None:
    section.without_effect(*_WITHOUT_EFFECT, as_here=(False,))
    section.without_effect("zero_allow_untested_optimizer", as_here=(True, False))
    section.without_effect("zero_force_ds_cpu_optimizer", as_here=(True, False))
    section.comments()
    compiled = section.section("compile")
    compiled.refuse("deepcompile", "call engine.compile(), or torch.compile on the model's blocks before")
    compiled.rest()  # what else is there is for deepcompile, or for engine.compile()'s caller
    parallel = section.section("tensor_parallel")
    parallel.refuse("autotp_size", "all ranks hold the same model here", unless=(0, 1))
    parallel.rest()
    section.refuse("sequence_parallel_size", "all ranks see other samples here", unless=(1,))
    for key, because in _OTHER_ENGINES.items():
        section.refuse(key, because, unless=({},))
    for key in _REMOVED:
        section.refuse(key, "DeepSpeed has removed it, and it can't be had here either", unless=(False, {}))
    idle = section.finish()
    if idle and this_rank() == 0:
        warnings.warn(f"keys of the config that have no effect here: {', '.join(idle)}", UserWarning, stacklevel=4)


def _refuse_auto(values: Mapping[str, Any]) -> None:
    auto = list(_autos(values))
    if auto:
        told = [f"{name} ({_AUTO[name]})" if name in _AUTO else name for name in auto]
        raise ValueError(
            f'the config says "auto" for {", ".join(told)}. That is for Hugging Face\'s Trainer, which puts its own '
            "arguments (in brackets) there before the config is used. Write the values, or leave a key out to have its "
            "default"
        )


def _autos(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, value in values.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            yield from _autos(value, f"{name}.")
        elif isinstance(value, str) and value == "auto" and name != "data_types.keep_in_fp32_modules":
            yield name
