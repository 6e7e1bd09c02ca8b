"""What an engine says of its config, and what of it may change while it trains."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from stepstack_deepspeed._config import Config


class ConfigCalls:
    """The part of `Engine` that answers from the config. `_backwards` of a step are under way."""

    _config: Config
    _backwards: int

    @property
    def config(self) -> Mapping[str, Any]:
        """As it was given, a file as the dict in it."""
        return self._config.values

    def train_batch_size(self) -> int:
        """Samples in a step of the optimizer, of all ranks."""
        return self._config.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples in a backward of one rank."""
        return self._config.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Backwards in a step of the optimizer."""
        return self._config.batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """The three of them."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Accumulate so many micro-batches from the next step on that a step has so many samples.

        ValueError if no number of them does; RuntimeError in the middle of an accumulation.
        """
        batch = self._config.batch
        accumulation, rest = divmod(train_batch_size, batch.micro * batch.ranks)
        if rest or accumulation < 1:
            raise ValueError(
                f"train_batch_size {train_batch_size} is not a multiple of train_micro_batch_size_per_gpu * ranks, "
                f"{batch.micro} * {batch.ranks} = {batch.micro * batch.ranks}"
            )
        if self._backwards:
            raise RuntimeError(
                f"set_train_batch_size() after {self._backwards} backwards, whose losses were divided by "
                f"{batch.accumulation}: call it after the step of the optimizer"
            )
        self._config = replace(self._config, batch=replace(batch, train=train_batch_size, accumulation=accumulation))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """From now on a micro-batch has so many samples, which the data have to follow; a step has as many of them."""
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be 1 or more, got {micro_batch_size}")
        batch = self._config.batch
        train = micro_batch_size * batch.accumulation * batch.ranks
        self._config = replace(self._config, batch=replace(batch, train=train, micro=micro_batch_size))

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts the backwards of a step; otherwise each `step` is one of the optimizer."""
        return self._config.managed_accumulation

    def gradient_clipping(self) -> float:
        """The norm that gradients are scaled down to; 0 for no clipping."""
        return self._config.gradient_clipping

    def zero_optimization_stage(self) -> int:
        """0 to 3."""
        return self._config.sharding.stage

    def zero_optimization(self) -> bool:
        """Whether anything is spread over the ranks."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether each rank keeps its share of the gradients only."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether each rank keeps its share of the parameters only."""
        return self.zero_optimization_stage() == 3

    def fp16_enabled(self) -> bool:
        """Whether the weights are fp16 in forward and backward."""
        return self._config.precision.dtype == torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether the weights are bf16 in forward and backward."""
        return self._config.precision.dtype == torch.bfloat16

    def fp16_auto_cast(self) -> bool:
        """Whether inputs are made fp16."""
        return self._config.precision.casts_inputs

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Of the weights in forward and backward, and of the gradients that are accumulated."""
        precision = self._config.precision
        return precision.dtype, precision.grad_dtype or precision.dtype

    def dynamic_loss_scale(self) -> bool:
        """Whether there is a loss scale that changes by itself."""
        rule = self._config.precision.loss_scale
        return rule is not None and not rule.fixed

    def initial_dynamic_scale(self) -> float:
        """The loss scale at the start; 1 without fp16."""
        rule = self._config.precision.loss_scale
        return 1.0 if rule is None else rule.fixed or 2.0**rule.initial_power

    def gradient_predivide_factor(self) -> float:
        """The part of the number of ranks by which gradients are divided before they are added up."""
        return self._config.sharding.grad_predivisor

    def optimizer_name(self) -> str | None:
        """What the config names."""
        name: str | None = self._said("optimizer", "type")
        return name

    def optimizer_params(self) -> dict[str, Any] | None:
        """With these options."""
        params: dict[str, Any] | None = self._said("optimizer", "params")
        return params

    def scheduler_name(self) -> str | None:
        """What the config names."""
        name: str | None = self._said("scheduler", "type")
        return name

    def scheduler_params(self) -> dict[str, Any] | None:
        """With these options."""
        params: dict[str, Any] | None = self._said("scheduler", "params")
        return params

    def steps_per_print(self) -> int | None:
        """What the config says. This engine prints nothing."""
        steps: int | None = self._said("steps_per_print")
        return steps

    def wall_clock_breakdown(self) -> bool:
        """What the config says. This engine measures nothing."""
        return bool(self._said("wall_clock_breakdown"))

    def memory_breakdown(self) -> bool:
        """What the config says. This engine measures nothing."""
        return bool(self._said("memory_breakdown"))

    def dump_state(self) -> bool:
        """What the config says. This engine prints nothing."""
        return bool(self._said("dump_state"))

    def _said(self, *keys: str) -> Any:
        value: Any = self._config.values
        for key in keys:
            value = (value or {}).get(key)
        return value
