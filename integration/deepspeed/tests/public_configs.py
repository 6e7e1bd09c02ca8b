"""Configs that people start from: what distinguishes them, by repository and file, and "auto" as trainers fill it in.

Batch sizes and what only prints is left out. Configs that say the same are one row.
"""

from typing import Any

AUTO = "auto"
HIDDEN = 29
FILLED: dict[str, Any] = {
    "gradient_clipping": 1.0,
    "bf16.enabled": True,
    "bfloat16.enabled": True,
    "fp16.enabled": False,
    "optimizer.params.lr": 2e-3,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.01,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": 2e-3,
    "scheduler.params.warmup_num_steps": 3,
    "scheduler.params.total_num_steps": 10,
    "zero_optimization.reduce_bucket_size": HIDDEN**2,
    "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * HIDDEN**2),
    "zero_optimization.stage3_param_persistence_threshold": 10 * HIDDEN,
    "zero_optimization.stage3_max_live_parameters": 10**9,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": True,
    "zero_optimization.offload_param.buffer_size": 10**8,
}
"""What Hugging Face's Trainer and Accelerate put in place of "auto", for a model of that hidden size."""


def filled(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    return {
        key: filled(value, f"{path}{key}.")
        if isinstance(value, dict)
        else FILLED[path + key]
        if isinstance(value, str) and value == AUTO
        else value
        for key, value in values.items()
    }


def fp16(enabled: Any = AUTO, power: int = 16, **more: Any) -> dict[str, Any]:
    rule = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": power, "hysteresis": 2}
    return {"enabled": enabled, "min_loss_scale": 1} | rule | more


def adam(name: str = "Adam", **params: Any) -> dict[str, Any]:
    return {"type": name, "params": params}


def warmup(name: str, **params: Any) -> dict[str, Any]:
    return {"type": name, "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO} | params}


CPU = {"device": "cpu", "pin_memory": True}
EITHER = {"bf16": {"enabled": AUTO}, "fp16": fp16()}
BF16 = {"bf16": {"enabled": True}}
SIZES = {
    "reduce_bucket_size": AUTO,
    "stage3_prefetch_bucket_size": AUTO,
    "stage3_param_persistence_threshold": AUTO,
}
LARGE = {"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9, "sub_group_size": 1e9}
GATHER = "stage3_gather_16bit_weights_on_model_save"

AXOLOTL_3 = {"stage": 3, "overlap_comm": True, "sub_group_size": 0, "max_live_parameters": 0, "max_reuse_distance": 0}
AXOLOTL_3 |= SIZES | {"contiguous_gradients": True, "gather_16bit_weights_on_model_save": True}
FACTORY = {"gradient_clipping": AUTO, "zero_allow_untested_optimizer": True}
FACTORY_2 = {"allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": False, "reduce_scatter": True}
FACTORY_2 |= {"reduce_bucket_size": 5e8, "contiguous_gradients": True, "round_robin_gradients": True}
FACTORY_3 = SIZES | LARGE | {"stage": 3, "overlap_comm": False, "contiguous_gradients": True, GATHER: True}
TORCH_ADAM = adam("AdamW", lr=AUTO, weight_decay=AUTO, torch_adam=True, adam_w_mode=True)
ACCELERATE = {"fp16": fp16(True), "optimizer": TORCH_ADAM, "gradient_clipping": AUTO}
ACCELERATE |= {"scheduler": warmup("WarmupDecayLR", total_num_steps=AUTO)}
ACCELERATE_2 = {
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
}
ACCELERATE_2 |= {"reduce_bucket_size": AUTO, "contiguous_gradients": True}
ACCELERATE_3 = SIZES | LARGE | {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, GATHER: AUTO}
TRAINER = {"optimizer": adam("AdamW", lr=AUTO, betas=AUTO, eps=AUTO, weight_decay=AUTO), "gradient_clipping": AUTO}
TRAINER |= {"scheduler": warmup("WarmupLR")}
OLD_GATHER = {"stage3_gather_fp16_weights_on_model_save": True}
CIFAR = adam(lr=1e-3, betas=[0.8, 0.999], eps=1e-8, weight_decay=3e-7)
CIFAR_16 = {"fp16_master_weights_and_grads": False, "loss_scale_window": 500}
CHAT = {"overlap_comm": True, "stage3_max_live_parameters": 3e7, "stage3_prefetch_bucket_size": 3e7}
CHAT |= {"stage3_param_persistence_threshold": 1e4, "memory_efficient_linear": False}
LLAMA_8B = {"overlap_comm": False, "reduce_bucket_size": 4e8, "sub_group_size": 4e8}

TRAINED: dict[str, dict[str, Any]] = {
    "axolotl zero1": {"gradient_clipping": AUTO, "bf16": {"enabled": AUTO}, "fp16": fp16(power=32, auto_cast=False)}
    | {"zero_optimization": {"stage": 1, "overlap_comm": True}},
    "axolotl zero2": {"gradient_clipping": AUTO, "bf16": {"enabled": AUTO}, "fp16": fp16(power=32, auto_cast=False)}
    | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True}},
    "axolotl zero3": {"gradient_clipping": AUTO, "bf16": {"enabled": AUTO}, "fp16": fp16(power=32, auto_cast=False)}
    | {"zero_optimization": AXOLOTL_3},
    "axolotl zero3_bf16": BF16 | {"gradient_clipping": AUTO, "zero_optimization": AXOLOTL_3},
    "axolotl zero3_bf16_cpuoffload_all": BF16
    | {"gradient_clipping": AUTO, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    | {"zero_optimization": AXOLOTL_3 | {"offload_optimizer": CPU, "offload_param": CPU}},
    "axolotl zero3_bf16_cpuoffload_params": BF16
    | {"gradient_clipping": AUTO, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    | {"zero_optimization": AXOLOTL_3 | {"offload_param": CPU}},
    "LLaMA-Factory ds_z0_config": FACTORY | EITHER | {"zero_optimization": FACTORY_2 | {"stage": 0}},
    "LLaMA-Factory ds_z2_config": FACTORY | EITHER | {"zero_optimization": FACTORY_2 | {"stage": 2}},
    "LLaMA-Factory ds_z2_offload_config": FACTORY
    | EITHER
    | {"zero_optimization": FACTORY_2 | {"stage": 2, "offload_optimizer": CPU}},
    "LLaMA-Factory ds_z3_config": FACTORY | EITHER | {"zero_optimization": FACTORY_3},
    "LLaMA-Factory ds_z3_offload_config": FACTORY
    | EITHER
    | {"zero_optimization": FACTORY_3 | {"offload_optimizer": CPU, "offload_param": CPU}},
    "LLaMA-Factory ds_z3_fp8_config": FACTORY
    | {"bf16": {"enabled": AUTO}, "fp16": fp16(False), "comms_config": {"verbose": False}}
    | {"monitor_config": {"enabled": True, "tag": "DeepSpeedMonitor", "csv_monitor": {"enabled": False}}}
    | {"zero_optimization": FACTORY_3 | {"offload_optimizer": {"device": "cpu", "pin_memory": False}}},
    "accelerate zero_stage1_config": ACCELERATE | {"zero_optimization": ACCELERATE_2 | {"stage": 1}},
    "accelerate zero_stage2_config": ACCELERATE | {"zero_optimization": ACCELERATE_2 | {"stage": 2}},
    "accelerate zero_stage2_offload_config": ACCELERATE
    | {"zero_optimization": ACCELERATE_2 | {"stage": 2, "offload_optimizer": CPU}},
    "accelerate zero_stage3_config": ACCELERATE
    | {"optimizer": adam("AdamW", lr=AUTO, weight_decay=AUTO), "zero_optimization": ACCELERATE_3},
    "accelerate zero_stage3_offload_config": ACCELERATE
    | {"optimizer": adam("AdamW", lr=AUTO, weight_decay=AUTO)}
    | {"zero_optimization": ACCELERATE_3 | {"offload_optimizer": CPU, "offload_param": CPU}},
    "transformers tests ds_config_zero2": TRAINER
    | EITHER
    | {"zero_optimization": ACCELERATE_2 | {"stage": 2, "offload_optimizer": CPU, "reduce_bucket_size": 2e8}},
    "transformers tests ds_config_zero3": TRAINER
    | EITHER
    | {"zero_optimization": ACCELERATE_3 | {"offload_optimizer": CPU, "offload_param": CPU, GATHER: True}},
    "transformers tests ds_config_zero3_bf16 (old)": TRAINER
    | {"bfloat16": {"enabled": AUTO}}
    | {"zero_optimization": SIZES | LARGE | OLD_GATHER | {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}},
    "DeepSpeedExamples cifar10_deepspeed, fp16": {"optimizer": CIFAR, "gradient_clipping": 1.0}
    | {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 1000}}}
    | {"prescale_gradients": False, "bf16": {"enabled": False}, "fp16": fp16(True, 15, **CIFAR_16)}
    | {"zero_optimization": {"stage": 2, "reduce_bucket_size": 50000000, "cpu_offload": False}},
    "DeepSpeedExamples imagenet ds_fp16_z1_config": {"optimizer": CIFAR, "gradient_clipping": 0}
    | {"cuda_visible_devices": 0, "fp16": {"enabled": True, "auto_cast": True}, "zero_optimization": {"stage": 1}},
    "DeepSpeedExamples compression/gpt2 ds_config": {"optimizer": CIFAR, "gradient_clipping": 1.0}
    | {"prescale_gradients": True, "fp16": {"enabled": True}, "zero_optimization": {"stage": 0}},
    "DeepSpeedExamples BingBertSquad deepspeed_bsz24_config": {"gradient_clipping": 1.0, "fp16": {"enabled": True}}
    | {"optimizer": adam(lr=3e-5, weight_decay=0.0, bias_correction=False)},
    "DeepSpeedExamples gan_deepspeed_config": {"optimizer": adam(lr=2e-4, betas=[0.5, 0.999], eps=1e-8)},
    "DeepSpeedExamples DeepSpeed-Chat, stage 2, offload": {"gradient_clipping": 1.0, "bfloat16": {"enabled": True}}
    | {"hybrid_engine": {"enabled": False, "max_out_tokens": 512}, "tensorboard": {"enabled": False}}
    | {"zero_optimization": CHAT | {"stage": 2, "offload_param": {"device": "cpu"}, "offload_optimizer": CPU}},
    "DeepSpeedExamples HelloDeepSpeed train_bert_ds": BF16
    | {"optimizer": adam(lr=1e-4), "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
    "DeepSpeedExamples SuperOffload finetune_llama-8b, zerooffload": BF16
    | {"zero_optimization": LLAMA_8B | {"stage": 3, "offload_optimizer": CPU}},
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "LLaMA-Factory ds_z2_autotp_config": (
        {"_comment": "", "tensor_parallel": {"autotp_size": 2}},
        "tensor_parallel.autotp_size is 2: all ranks hold the same model",
    ),
    "LLaMA-Factory ds_z3_alst_config": (
        {"sequence_parallel": {"enabled": True, "size": 4}},
        "keys? that this engine does not know: 'sequence_parallel'",
    ),
    "DeepSpeedExamples compression/*, nearly all": (
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
        "^compression_training is there: DeepSpeed has removed it, and it can't be had here either$",
    ),
    "DeepSpeedExamples bing_bert, 1-bit Adam": (
        {"optimizer": adam("OneBitAdam", lr=4e-4, freeze_step=23000)},
        "optimizer.type is 'OneBitAdam', .*: gradients are not compressed here",
    ),
    "DeepSpeedExamples bing_bert, 0/1 Adam": (
        {"optimizer": adam("ZeroOneAdam", lr=4e-4, var_freeze_step=12500)},
        "optimizer.type is 'ZeroOneAdam', .*: gradients are not compressed here",
    ),
    "DeepSpeedExamples bing_bert, LAMB and 1-bit LAMB": (
        {"optimizer": adam("Lamb", lr=2e-3, max_coeff=0.3)},
        "optimizer.type is 'Lamb', .*: it needs norms of whole parameters",
    ),
    "DeepSpeedExamples bing_bert, progressive layer drop": (
        {"progressive_layer_drop": {"enabled": True, "theta": 0.5}},
        "progressive_layer_drop is there: DeepSpeed has removed it",
    ),
    "DeepSpeedExamples data_efficiency": (
        {"data_efficiency": {"enabled": True}},
        "data_efficiency is there: it changes the data",
    ),
    "DeepSpeedExamples ZenFlow zf_config": (
        {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}},
        "zenflow is there: every gradient is used in the step after its backward",
    ),
    "DeepSpeedExamples SuperOffload": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": CPU | {"super_offload": True}}},
        "super_offload is True: the optimizer steps once",
    ),
    "DeepSpeedExamples bf16_master_weight bf16_full": (
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
        "bf16_master_weights_and_grads is True: master weights are fp32 here",
    ),
    "DeepSpeedExamples sglang ds_offload_nvme": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"}}},
        'offload_param.device is "nvme": parameters live on a device or on the CPU',
    ),
    "DeepSpeedExamples tensor_parallel ds_config": (
        {"tensor_parallel": {"autotp_size": 4}},
        "tensor_parallel.autotp_size is 4: all ranks hold the same model",
    ),
    "DeepSpeedExamples autosp_config": (
        {"compile": {"deepcompile": True, "passes": ["autosp"]}, "sequence_parallel_size": 2},
        "compile.deepcompile is True: call engine.compile",
    ),
}
