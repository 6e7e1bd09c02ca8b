"""What is spread over the ranks, and where it lives: `zero_optimization` of a config."""

from dataclasses import dataclass

from stepstack_deepspeed._section import Section

# Of machinery that is built otherwise here: they tune it, and change no result.
_TUNING = (
    "allgather_bucket_size",
    "cpu_offload_use_pin_memory",
    "enable_sanity_checks",
    "ignore_unused_parameters",
    "leaf_module",
    "legacy_stage1",
    "load_from_fp32_weights",
    "log_trace_cache_warnings",
    "memory_efficient_linear",
    "model_persistence_threshold",
    "module_granularity_threshold",
    "override_module_apply",
    "param_persistence_threshold",
    "parameter_alignment",
    "pipeline_loading_checkpoint",
    "prefetch_bucket_size",
    "round_robin_gradients",
    "save_muon_momentum_buffer_in_memory",
    "stage3_allgather_sequential",
    "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "stage3_use_all_reduce_for_fetch_params",
    "sub_group_size",
    "use_all_reduce_for_fetch_params",
    "use_multi_rank_bucket_allreduce",
)
_AS_HERE = (
    "allgather_partitions",
    "contiguous_gradients",
    "elastic_checkpoint",
    "gather_16bit_weights_on_model_save",
    "overlap_comm",
    "reduce_scatter",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
)
_QUANTIZED = "weights and gradients travel in their own dtypes here"


@dataclass(frozen=True)
class Offload:
    """Master weights and moments live on the CPU, and are stepped there."""

    ratio: float
    """The part of them."""
    pin_memory: bool

    @classmethod
    def read(cls, offload: Section) -> "Offload | None":
        device = offload.choice("device", "none", ("none", "cpu", "nvme"))
        ratio = offload.number("ratio", 1.0, at_least=0, at_most=1)
        pin_memory = offload.flag("pin_memory", True)
        offload.without_effect("buffer_count", "cpuadam_cores_perc", "fast_init", "pipeline_read", "pipeline_write")
        offload.refuse("super_offload", "the optimizer steps once, after backward; leave it out")
        if device == "nvme":
            raise ValueError(f'{offload.name("device")} is "nvme": states live on a device or on the CPU; say "cpu"')
        offload.without_effect("nvme_path")
        return cls(ratio, pin_memory) if device == "cpu" and ratio > 0 else None


@dataclass(frozen=True)
class Sharding:
    """What each rank holds a share of only: nothing (stage 0), states (1), gradients too (2), parameters too (3)."""

    stage: int
    offload: Offload | None
    bucket_numel: int | None
    """Gradients that are reduced as a unit; None leaves it to the optimizer."""
    grad_divisor: float | None
    """What the sum over ranks is divided by; None is their number."""
    grad_predivisor: float
    """The part of that before the sum."""
    live_numel: int
    """A model of up to so many parameters stays gathered from its forward to its backward (stage 3)."""

    @classmethod
    def read(cls, config: Section, ranks: int) -> "Sharding":
        zero = config.section("zero_optimization")
        stage = zero.whole("stage", 0, at_least=0)
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"{zero.name('stage')} must be 0, 1, 2 or 3, got {stage}")
        offload = _read_offload(zero, stage)
        if stage == 3 and offload is not None and offload.ratio != 1:
            raise ValueError(
                f"zero_optimization.offload_optimizer.ratio is {offload.ratio:g} in stage 3, where it must be 0 or 1: "
                "a part of the elements can be offloaded in stages 1 and 2"
            )
        zero.without_effect(*_TUNING)
        zero.without_effect(*_AS_HERE, as_here=(True,))
        zero.without_effect("compute_grad_norm", as_here=(True,))
        for key in ("quantized_weights", "quantized_nontrainable_weights", "quantized_gradients"):
            zero.refuse(f"zero_{key}", _QUANTIZED)
        zero.refuse("zero_hpz_partition_size", "parameters are gathered from all ranks", unless=(1, 0))
        zero.refuse("zenflow", "every gradient is used in the step after its backward; leave it out", unless=())
        bucket_numel = zero.whole("reduce_bucket_size", None)
        divisor, predivisor = _divisors(config, ranks)
        if stage == 3 and (divisor, predivisor) != (None, 1):
            raise ValueError(
                "in stage 3 gradients are averaged as FSDP2 averages them: leave out prescale_gradients, "
                "gradient_predivide_factor and gradient_allreduce_op"
            )
        return cls(stage, offload, bucket_numel, divisor, predivisor, _live_numel(zero))

    @property
    def reduces_always(self) -> bool:
        """After every backward, since there is no place for gradients that are not reduced."""
        return self.stage >= 2


def _read_offload(zero: Section, stage: int) -> Offload | None:
    """What either of the two sections asks for; in stage 3 the parameters' shares are what the optimizer steps."""
    offload = Offload.read(_new_spelling(zero, "offload_optimizer", "cpu_offload"))
    params = _new_spelling(zero, "offload_param", "cpu_offload_param")
    if stage != 3:  # parameters are whole on each rank, and stay where they are used
        params.without_effect("device", as_here=("none",))
        params.rest()
        return offload
    device = params.choice("device", "none", ("none", "cpu", "nvme"))
    pin_memory = params.flag("pin_memory", True)
    params.without_effect("buffer_count", "buffer_size", "max_in_cpu", "nvme_path")
    if device == "none":
        return offload
    if device == "nvme":
        raise ValueError(f'{params.name("device")} is "nvme": parameters live on a device or on the CPU; say "cpu"')
    return offload or Offload(1.0, pin_memory)


def _new_spelling(zero: Section, new: str, old: str) -> Section:
    """The section, also where the config says it by the flag that was there before."""
    if not zero.flag(old):
        return zero.section(new)
    if zero.value(new, None) is not None:
        raise ValueError(f"{zero.name(old)} is the old spelling of {zero.name(new)}, which is there too: leave it out")
    return Section({"device": "cpu"}, zero.name(new))


def _live_numel(zero: Section) -> int:
    """All of it is live between the two, and the first block's next use is twice its size away."""
    live, distance = (
        next((zero.whole(key, None, at_least=0) for key in (f"stage3_{name}", name) if key in zero), None)
        for name in ("max_live_parameters", "max_reuse_distance")
    )
    return min(10**9 if live is None else live, (10**9 if distance is None else distance) // 2)


def _divisors(config: Section, ranks: int) -> tuple[float | None, float]:
    summed = config.choice("gradient_allreduce_op", "mean", ("mean", "sum")) == "sum"
    predivisor = config.number("gradient_predivide_factor", 1.0, at_least=1e-30)
    if config.flag("prescale_gradients"):
        predivisor = ranks
    return (1.0 if summed else None), (1.0 if summed else predivisor)
