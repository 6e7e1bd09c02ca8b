"""What a config may say, and what an error says of one that may not."""

import json
import logging
import sys

import pytest
import torch
from plain import config

from stepstack_deepspeed._config import read_config
from stepstack_fused_adam import FusedAdam

BATCH = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4}


def read(values=None, ranks=2, **more):
    return read_config({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0} | (values or {}) | more, ranks)


@pytest.mark.parametrize(
    "given",
    [
        set(BATCH),
        {"train_batch_size", "train_micro_batch_size_per_gpu"},
        {"train_batch_size", "gradient_accumulation_steps"},
        {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps"},
    ],
    ids=" and ".join,
)
def test_of_three_batch_sizes_one_follows_from_the_others(given):
    batch = read_config({"gradient_clipping": 1.0} | {key: BATCH[key] for key in given}, ranks=2).batch
    assert (batch.train, batch.micro, batch.accumulation, batch.ranks) == (24, 3, 4, 2)


@pytest.mark.parametrize("key", ["train_batch_size", "train_micro_batch_size_per_gpu"])
def test_with_one_batch_size_nothing_is_accumulated(key):
    batch = read_config({key: 8, "gradient_clipping": 1.0}, ranks=2).batch
    assert (batch.train, batch.micro, batch.accumulation) == ((8, 4, 1) if key == "train_batch_size" else (16, 8, 1))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, r"needs train_batch_size or train_micro_batch_size_per_gpu.* \* 2 ranks"),
        ({"gradient_accumulation_steps": 2}, "needs train_batch_size or train_micro_batch_size_per_gpu"),
        (BATCH | {"train_batch_size": 25}, r"train_batch_size is 25, but .* is 3 \* 4 \* 2 = 24"),
        (
            {"train_batch_size": 9},
            r"train_batch_size 9 is not a multiple of gradient_accumulation_steps \* ranks, 1 \* 2",
        ),
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3},
            r"gradient_accumulation_steps can't follow: train_batch_size 8 is not a multiple of .* 3 \* 2 = 6",
        ),
        ({"train_batch_size": 0}, "train_batch_size must be a whole number, 1 or more, got 0"),
        ({"train_batch_size": 2.5}, r"train_batch_size must be a whole number, 1 or more, got 2\.5"),
        ({"train_batch_size": True}, "train_batch_size must be a whole number, 1 or more, got True"),
    ],
)
def test_batch_sizes_that_do_not_agree_are_an_error_with_the_numbers(values, words):
    with pytest.raises(ValueError, match=words):
        read_config(values, ranks=2)


def test_a_file_is_read_as_the_dict_in_it(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config(stage=2, dtype="fp16")))
    assert read_config(path, 2) == read_config(str(path), 2) == read_config(config(stage=2, dtype="fp16"), 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{train_batch_size: 2}", "is not JSON: .*double quotes: line 1.* .comments are fine"),
        ("[1]", "must hold an object"),
        (b"\xff\xfe", "is not JSON"),
        ('{"fp16": {"enabled": true, "enabled": false}}', "has a key twice in one object: enabled"),
    ],
)
def test_a_file_that_holds_no_config_is_an_error(tmp_path, text, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "hjson", None)
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=words):
        read_config(path, 1)


def test_comments_and_a_last_comma_are_let_pass_and_text_is_left_alone(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        """{ # batches
        "train_batch_size": 2, // of all ranks
        /* "gradient_clipping": 3, */ "gradient_clipping": 1.0,
        "_note": "see https://example.org/#a, /* b */ \\" # c",
        "fp16": {"enabled": false,},
        }"""
    )
    read = read_config(path, 1)
    assert (read.batch.train, read.gradient_clipping) == (2, 1.0)
    assert read.values["_note"] == 'see https://example.org/#a, /* b */ " # c'


def test_below_stage_3_parameters_stay_where_they_are():
    with pytest.warns(UserWarning, match=r"no effect here: zero_optimization\.offload_param\.device"):
        read(zero_optimization={"stage": 2, "offload_param": {"device": "cpu", "buffer_count": 5}})


def test_offload_may_be_said_in_its_old_spelling_and_for_the_parameters_only():
    asked = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    for zero in (
        {"stage": 3, "cpu_offload": True},
        {"stage": 3, "cpu_offload": True, "cpu_offload_param": True},
        {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}},
    ):
        assert read(zero_optimization=zero) == read(zero_optimization=asked)
    assert read(zero_optimization={"stage": 2, "cpu_offload": True}).sharding.offload.ratio == 1


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"path of a JSON file; there is no file '.*none\.json'"):
        read_config(tmp_path / "none.json", 1)


def test_a_config_is_a_dict_or_a_path():
    for given in (None, 3, [config()]):
        with pytest.raises(TypeError, match="config must be a dict or the path of a JSON file, got"):
            read_config(given, 1)


def test_absent_clipping_is_1_and_logged(caplog):
    with caplog.at_level(logging.INFO, "stepstack_deepspeed"):
        assert read_config({"train_batch_size": 2}, 1).gradient_clipping == 1.0
    assert "does not say gradient_clipping: it is 1.0" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "stepstack_deepspeed"):
        assert read(gradient_clipping=0).gradient_clipping == 0
    assert caplog.text == ""


def test_all_unknown_keys_are_in_one_error_with_the_nearest_known():
    values = {"gradient_cliping": 1.0, "zero_optimization": {"stage": 1, "offload_optimiser": {}}, "fp16": {"xyz": 1}}
    with pytest.raises(ValueError, match="the config has keys that this engine does not know") as caught:
        read(values)
    for word in (
        "'gradient_cliping' (did you mean 'gradient_clipping'?)",
        "'zero_optimization.offload_optimiser' (did you mean 'offload_optimizer'?)",
        "'fp16.xyz'",
    ):
        assert word in str(caught.value)


def test_keys_without_effect_are_in_one_warning():
    values = {
        "steps_per_print": 10,
        "wall_clock_breakdown": False,  # as it is here
        "zero_optimization": {"stage": 2, "contiguous_gradients": True, "overlap_comm": False, "sub_group_size": 1e9},
    }
    with pytest.warns(UserWarning, match="no effect here") as caught:
        read(values)
    (warning,) = caught
    assert str(warning.message).endswith("steps_per_print, zero_optimization.sub_group_size, "
                                         "zero_optimization.overlap_comm")  # fmt: skip


def test_auto_is_explained_for_all_keys_that_say_it():
    values = config(stage=2, gradient_clipping="auto", bf16={"enabled": "auto"})
    values["zero_optimization"]["reduce_bucket_size"] = "auto"
    values["optimizer"] = {"type": "AdamW", "params": {"lr": "auto"}}
    with pytest.raises(ValueError, match=r"Hugging Face's Trainer.*Write the values") as caught:
        read_config(values, 2)
    for word in (
        "gradient_clipping (max_grad_norm)",
        "bf16.enabled (bf16)",
        "zero_optimization.reduce_bucket_size",
        "optimizer.params.lr (learning_rate)",
    ):
        assert word in str(caught.value)


def test_auto_stays_where_it_is_a_value():
    assert read(data_types={"keep_in_fp32_modules": "auto"})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled are both true"),
        ({"fp16": {"enabled": 1}}, "fp16.enabled must be true or false, got 1"),
        ({"fp16": True}, "fp16 must be an object with keys and values, got True"),
        ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale must be 0 or more, got -1"),
        ({"fp16": {"loss_scale_window": 0}}, "fp16.loss_scale_window must be a whole number, 1 or more, got 0"),
        ({"fp16": {"enabled": True, "min_loss_scale": 2.0**20}}, "a loss scale of 65536, below fp16.min_loss_scale"),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, "master weights are fp32 here"),
        ({"data_types": {"grad_accum_dtype": "fp64"}}, "data_types.grad_accum_dtype must be one of 'fp32'.*got 'fp64'"),
        ({"data_types": {"param_dtype": "bf16"}}, "but fp16.enabled and bf16.enabled say fp32"),
        ({"data_types": {"buffer_dtype": "fp32"}}, "buffers keep the dtype"),
        ({"communication_data_type": "fp16"}, "gradients are reduced in the dtype that they are accumulated in.*fp32"),
        ({"gradient_clipping": -1}, "gradient_clipping must be 0 or more, got -1"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping must be a number, got nan"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage must be 0, 1, 2 or 3, got 4"),
        ({"zero_optimization": True}, "zero_optimization must be an object"),
        (
            {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "none"}}},
            "cpu_offload is the old spelling of zero_optimization.offload_optimizer, which is there too",
        ),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "travel in their own dtypes"),
        ({"zero_optimization": {"zero_hpz_partition_size": 2}}, "parameters are gathered from all ranks"),
        ({"zero_optimization": {"zenflow": {}}}, "zenflow is {}: every gradient is used in the step after"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, 'is "nvme": states live on a device or'),
        ({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}, "must be one of 'none', 'cpu', 'nvme'"),
        ({"zero_optimization": {"offload_optimizer": {"ratio": 2}}}, r"ratio must be in \[0, 1\], got 2"),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}},
            "ratio is 0.3 in stage 3, where it must be 0 or 1: .*stages 1 and 2",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "offload_param.device is .nvme.: parameters live on a device or on the CPU",
        ),
        ({"zero_optimization": {"offload_optimizer": {"super_offload": True}}}, "the optimizer steps once"),
        ({"gradient_allreduce_op": "max"}, "gradient_allreduce_op must be one of 'mean', 'sum', got 'max'"),
        ({"prescale_gradients": True, "zero_optimization": {"stage": 3}}, "averaged as FSDP2 averages them"),
        ({"optimizer": {"type": "Lamb"}}, "'Lamb', which can't be had here: it needs norms of whole parameters"),
        ({"optimizer": {"type": "Lion", "params": {"eps": 1e-8}}}, "stepstack_deepspeed.Lion has no such argument"),
        ({"optimizer": {"type": "adamax"}}, "must be Adam, AdamW, Lion or one of torch.optim, spelled as there"),
        ({"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.99]}}}, "torch.optim.SGD has no such argument"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "1e-3"}}}, "optimizer.params.lr must be a number, got '1e-3'"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, "optimizer.params.betas must be two numbers"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, 'clipping is "gradient_clipping"'),
        ({"optimizer": {"type": "Adam", "params": {"lrr": 1}}}, "'optimizer.params.lrr' .did you mean 'lr'"),
        ({"optimizer": {"type": "Optimizer"}}, "must be Adam, AdamW, Lion or one of torch.optim"),
        ({"optimizer": {"type": 3}}, "optimizer.type must be a name, got 3"),
        ({"optimizer": {"params": {"lr": 1e-3}}}, "optimizer.type is missing"),
        ({"scheduler": {"params": {"warmup_num_steps": 3}}}, "scheduler.type is missing"),
        ({"scheduler": {"type": ["WarmupLR"]}}, "scheduler.type must be a name, got .'WarmupLR'."),
        ({"scheduler": {"type": "LRScheduler"}}, "or of torch.optim.lr_scheduler, spelled as there"),
        ({"scheduler": {"type": "StepLR", "params": {"step": 3}}}, "scheduler.params.step: .* it has step_size, gamma"),
        ({"scheduler": {"type": "LambdaLR"}}, "scheduler.params.lr_lambda is missing: .*LambdaLR needs it"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": float("nan")}}},
            "must be a number, .* got nan",
        ),
        ({3: 4}, "keys of the config must be text, got 3"),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, "bfloat16 is .*: it is the old name of bf16"),
        ({"fp16": {"enabled": True, "initial_scale_power": 2000}}, "initial_scale_power 2000 .* is too large for fp32"),
        ({"fp16": {"enabled": True, "loss_scale": 1e39}}, r"fp16.loss_scale 1e\+39 is too large for fp32"),
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}}, "params.cycle_max_lr is missing"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile is True: call engine.compile"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size is 2: all ranks hold the same model"),
        ({"compression_training": {"x": {"y": 1}}}, "compression_training is there: DeepSpeed has removed it"),
        ({"checkpoint": {"tag_validation": "no"}}, "checkpoint.tag_validation must be Ignore, Warn or Fail, got 'no'"),
        ({"scheduler": {"type": "Warmup"}}, "must be one of WarmupLR, .* or of torch.optim.lr_scheduler"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "scheduler.params.total_num_steps is missing"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "x"}}}, "must be a number, or a list with one"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "exp"}}}, "must be one of 'log', 'linear'"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast is .*: say bf16 or fp16"),
        ({"pipeline": {"stages": 2}}, "pipeline is .*: all ranks hold the same model here"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size is 2: all ranks see other samples"),
        ({"amp": {"enabled": True}}, "amp is .*: DeepSpeed has removed it"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(map(str, value)),
)
def test_what_cannot_be_had_is_refused_by_name_with_the_reason(values, words):
    with pytest.raises(ValueError, match=words):
        read(values)


@pytest.mark.parametrize(
    "values",
    [
        {"torch_autocast": {"enabled": False}},
        {"zero_optimization": {"zero_quantized_weights": False, "zenflow": None, "zero_hpz_partition_size": 1}},
        {
            "sparse_gradients": False,
            "pipeline": {},
            "data_efficiency": {"enabled": False, "seed": 1},
            "sequence_parallel_size": 1,
        },
        {"fp16": {"enabled": False, "min_loss_scale": 1e9}},
        {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False},
        {"zero_optimization": {"offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"}}},
        {"zero_optimization": {"cpu_offload": False, "gather_16bit_weights_on_model_save": True}},
        {"_comment": "for readers", "compile": {"disable": False, "backend": "inductor"}},
        {"tensor_parallel": {"autotp_size": 1}, "checkpoint": {"tag_validation": "Warn"}},
    ],
)
def test_a_key_that_asks_for_nothing_is_fine(values):
    assert read(values) == read()


def test_how_large_a_model_stays_gathered_follows_the_config():
    for zero, numel in (
        ({}, 500_000_000),
        ({"stage3_max_live_parameters": 100}, 100),
        ({"stage3_max_reuse_distance": 1e3}, 500),
        ({"max_live_parameters": 0}, 0),
    ):
        assert read(zero_optimization=zero).sharding.live_numel == numel


def test_adam_decays_weights_unless_told_otherwise():
    for name, params, decoupled in (
        ("Adam", {}, True),
        ("adam", {"adam_w_mode": False}, False),
        ("AdamW", {"adam_w_mode": False}, True),
    ):
        optimizer = read(optimizer={"type": name, "params": params}).optimizer
        assert optimizer.optimizer_class is FusedAdam
        assert optimizer.options["adam_w_mode"] is decoupled


def test_torch_adam_is_torchs_own_in_its_fused_form():
    optimizer = read(optimizer={"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-4}}).optimizer
    assert optimizer.optimizer_class is torch.optim.AdamW
    assert optimizer.options == {"fused": True, "lr": 1e-4}
    assert optimizer.has_flag
    l2 = read(optimizer={"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False}}).optimizer
    assert l2.optimizer_class is torch.optim.Adam


def test_moments_may_be_bf16():
    optimizer = read(optimizer={"type": "Adam", "params": {"fp32_optimizer_states": False}}).optimizer
    assert optimizer.options["exp_avg_dtype"] is optimizer.options["exp_avg_sq_dtype"] is torch.bfloat16


def test_any_other_name_is_one_of_torchs():
    optimizer = read(optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}).optimizer
    assert optimizer.optimizer_class is torch.optim.SGD
    assert optimizer.options == {"fused": True, "lr": 0.1, "momentum": 0.9}
    assert not read(optimizer={"type": "RMSprop"}).optimizer.has_flag
    assert read(optimizer={"type": "adagrad"}).optimizer.optimizer_class is torch.optim.Adagrad


def test_lion_is_the_papers():
    param = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    inner = read(optimizer={"type": "Lion", "params": {"lr": 0.1, "betas": [0.5, 0.75], "weight_decay": 0.5}}).optimizer
    optimizer = inner.optimizer_class([param], **inner.options)
    p, m = param.detach().clone(), torch.zeros(3)
    for grad in (torch.tensor([1.0, -1.0, 0.0]), torch.tensor([-0.5, -1.0, 2.0])):
        param.grad = grad
        optimizer.step()
        p = p * (1 - 0.1 * 0.5) - 0.1 * (0.5 * m + 0.5 * grad).sign()
        m = 0.75 * m + 0.25 * grad
        torch.testing.assert_close(param.detach(), p)


def test_the_loss_scale_follows_the_config():
    fp16 = {
        "enabled": True,
        "initial_scale_power": 10,
        "loss_scale_window": 7,
        "hysteresis": 3,
        "consecutive_hysteresis": True,
        "min_loss_scale": 4,
    }
    scaler = read(fp16=fp16).precision.loss_scale.scaler("cpu")
    assert scaler.get_scale() == 1024
    assert scaler.get_growth_interval() == 7
    assert (scaler.hysteresis, scaler.refill_hysteresis, scaler.min_scale) == (3, "on_clean_step", 4)
    scaler = read(fp16={"enabled": True}).precision.loss_scale.scaler("cpu")
    assert (scaler.get_scale(), scaler.get_growth_interval(), scaler.hysteresis) == (2.0**16, 1000, 2)
    assert (scaler.refill_hysteresis, scaler.min_scale) == ("on_growth", 1)


def test_a_given_loss_scale_stays():
    scaler = read(fp16={"enabled": True, "loss_scale": 128}).precision.loss_scale.scaler("cpu")
    for overflow in (True, False, True):
        scaler.update(found_inf=torch.tensor(float(overflow)))
    assert scaler.get_scale() == 128
    assert scaler.skipped_steps == 2
