"""Beside the real NeMo: a config, a model class of NeMo's and Lightning's trainer, with our words and with torch's."""

import json
import math
import types
import wave
from array import array

import pytest
import torch

import stepstack_nemo
from stepstack_testing import on_ranks

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]  # NeMo and what it imports warn of much

LABELS = ["a", "b", "c", "d", " "]
ADAM = {"lr": 0.01, "betas": [0.9, 0.98], "weight_decay": 0.001}
SCHED = {"name": "CosineAnnealing", "warmup_steps": 2, "min_lr": 1e-5, "max_steps": 8}
OURS = {"name": "stepstack_distributed_fused_adam", **ADAM}
TORCHS = {"name": "adamw", **ADAM}


@pytest.fixture(scope="module")
def asr():
    models = pytest.importorskip("nemo.collections.asr.models", reason="NeMo is not here: nox -s 'engines(nemo)'")
    return models.EncDecCTCModel


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    """A manifest of eight sine tones of half a second."""
    folder = tmp_path_factory.mktemp("speech")
    lines = []
    for number in range(8):
        path = folder / f"{number}.wav"
        samples = [int(9000 * math.sin(2 * math.pi * (200 + 60 * number) * i / 16000)) for i in range(8000)]
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, 16000, len(samples), "NONE", ""))
            file.writeframes(array("h", samples).tobytes())
        lines.append({"audio_filepath": str(path), "duration": 0.5, "text": "abcd"[number % 4] * 2})
    manifest = folder / "train.json"
    manifest.write_text("\n".join(map(json.dumps, lines)))
    return str(manifest)


def config(manifest, optim):
    modules = "nemo.collections.asr.modules"
    block = {"filters": 16, "repeat": 1, "kernel": [5], "dilation": [1], "dropout": 0.0, "separable": True}
    return {
        "sample_rate": 16000,
        "labels": LABELS,
        "train_ds": {
            "manifest_filepath": manifest,
            "sample_rate": 16000,
            "labels": LABELS,
            "batch_size": 2,
            "shuffle": False,
            "num_workers": 0,
        },
        "preprocessor": {
            "_target_": f"{modules}.AudioToMelSpectrogramPreprocessor",
            "sample_rate": 16000,
            "features": 16,
            "n_fft": 512,
            "window_size": 0.02,
            "window_stride": 0.01,
            "normalize": "per_feature",
            "dither": 0.0,
            "pad_to": 0,
        },
        "encoder": {
            "_target_": f"{modules}.ConvASREncoder",
            "feat_in": 16,
            "activation": "relu",
            "conv_mask": True,
            "jasper": [
                {**block, "stride": [2], "residual": False},
                {**block, "stride": [1], "residual": True},
            ],
        },
        "decoder": {
            "_target_": f"{modules}.ConvASRDecoder",
            "feat_in": 16,
            "num_classes": len(LABELS),
            "vocabulary": LABELS,
        },
        "optim": {**optim, "sched": SCHED},
    }


@pytest.fixture
def fit(fit_beside_nemo, asr, speech):
    """Train the small model on the tones: (rank, ranks, optim, …) as `fit_beside_nemo` has them."""
    omegaconf = pytest.importorskip("omegaconf")

    def fit_ctc(rank, ranks, optim, **more):
        def make(trainer):
            return asr(cfg=omegaconf.OmegaConf.create(config(speech, optim)), trainer=trainer)

        return fit_beside_nemo(rank, ranks, make, **more)

    return fit_ctc


PRECISIONS = {"fp32": ("32-true", 1e-5), "bf16": ("bf16-mixed", 2e-2), "fp16": ("16-mixed", 2e-2)}


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_trains_as_torch_adamw_does_under_the_same_trainer(fit, precision, clip):
    word, close = PRECISIONS[precision]
    common = {"precision": word, "clip": clip}
    reference = on_ranks(2, lambda rank: fit(rank, 2, TORCHS, ours=False, **common), timeout=60.0)
    for more in ({}, {"distribute_within_nodes": True}, {"distributed_size": 1, "overlap_param_sync": True}):
        found = on_ranks(2, lambda rank, optim={**OURS, **more}: fit(rank, 2, optim, **common), timeout=60.0)
        for (losses, values, scale, lr), (their_losses, their_values, their_scale, their_lr) in zip(
            found, reference, strict=True
        ):
            assert losses == pytest.approx(their_losses, rel=close)
            assert (values - their_values).norm() < close * their_values.norm()
            assert (scale, lr) == (their_scale, pytest.approx(their_lr))
        assert torch.equal(found[0][1], found[1][1])
        assert found[0][0][-1] < found[0][0][0]


def test_states_of_pairs_among_four(fit):
    common = {"clip": 0.5, "steps": 4}
    reference = on_ranks(4, lambda rank: fit(rank, 4, TORCHS, ours=False, **common), timeout=60.0)
    optim = {**OURS, "distributed_size": 2}
    found = on_ranks(4, lambda rank: fit(rank, 4, optim, **common), timeout=60.0)
    for (losses, values, *_), (their_losses, their_values, *_) in zip(found, reference, strict=True):
        assert losses == pytest.approx(their_losses, rel=1e-5)
        assert (values - their_values).norm() < 1e-5 * their_values.norm()


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_training_resumed_from_a_checkpoint_goes_on_as_if_it_had_not_stopped(fit, tmp_path, precision):
    path, common = str(tmp_path / "at-the-end-of-an-epoch.ckpt"), {"precision": precision, "clip": 0.5, "hook": True}
    optim = {**OURS, "args": {"name": "auto", **ADAM, "distribute_within_nodes": True}}
    whole = on_ranks(2, lambda rank: fit(rank, 2, optim, **common, save_to=path), timeout=60.0)
    rest = on_ranks(2, lambda rank: fit(rank, 2, optim, **common, resume=path), timeout=60.0)
    for (losses, values, *others), (all_losses, all_values, *all_others) in zip(rest, whole, strict=True):
        assert losses == pytest.approx(all_losses[4:], rel=1e-6)
        torch.testing.assert_close(values, all_values, rtol=1e-6, atol=1e-7)
        assert others == pytest.approx(all_others)


def test_gradients_are_accumulated_and_reduced_once(fit):
    common = {"clip": 0.5, "steps": 4, "accumulate_grad_batches": 2}
    reference = on_ranks(2, lambda rank: fit(rank, 2, TORCHS, ours=False, **common), timeout=60.0)
    for more in ({}, {"overlap_grad_sync": False}, {"capturable": True}):
        found = on_ranks(2, lambda rank, optim={**OURS, **more}: fit(rank, 2, optim, **common), timeout=60.0)
        for (losses, values, *_), (their_losses, their_values, *_) in zip(found, reference, strict=True):
            assert losses == pytest.approx(their_losses, rel=1e-5)
            assert (values - their_values).norm() < 1e-5 * their_values.norm()


def test_apexs_name_is_taken_over(fit):
    stepstack_nemo.take_over()
    optim = {**OURS, "name": "distributed_fused_adam", "bucket_cap_mb": 125, "contiguous_grad_buffer": True}
    losses, *_ = on_ranks(1, lambda rank: fit(rank, 1, optim), timeout=60.0)[0]
    assert losses[-1] < losses[0]


def test_both_forms_of_the_name_have_their_arguments(asr):
    parse = pytest.importorskip("nemo.core.optim").parse_optimizer_args
    for name, form in ((OURS["name"], "auto"), ("anything", "DistributedFusedAdam_params")):
        found = parse(name, {"name": form, "distributed_size": 2})
        assert (found["distributed_size"], found["betas"], found["dtype"]) == (2, (0.9, 0.999), "torch.float32")
    with pytest.raises(Exception, match="nonsense"):
        parse(OURS["name"], {"name": "auto", "nonsense": 2})
    stepstack_nemo.register()  # again, which changes nothing


def test_an_optimizer_that_would_average_nothing_is_refused_by_the_strategy(fit):
    def check(rank):
        with pytest.raises(ValueError, match=r"set optim\.name to stepstack_distributed_fused_adam"):
            fit(rank, 2, TORCHS)
        return True

    assert on_ranks(2, check, timeout=60.0) == [True, True]


def test_what_only_distributed_data_parallel_can_do_is_refused(asr):
    from stepstack_nemo.strategy import ShardedStrategy

    with pytest.raises(ValueError, match="find_unused_parameters"):
        ShardedStrategy(find_unused_parameters=True)


def test_zero_grad_through_lightnings_wrapper_is_the_optimizers_own_while_a_callback_has_replaced_it(asr):
    """NeMo's CUDAGraphCallback replaces `zero_grad` of the optimizer while it captures; the wrapper has the class's."""
    optimizers = pytest.importorskip("lightning.pytorch.core.optimizer")
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = stepstack_nemo.DistributedFusedAdam([param], capturable=True)
    wrapped = optimizers.LightningOptimizer(optimizer)
    optimizer.zero_grad = types.MethodType(lambda self, *_, **__: None, optimizer)
    param.sum().backward()
    address = param.grad.data_ptr()
    optimizer.zero_grad()
    assert param.grad.tolist() == [1, 1, 1]
    wrapped.zero_grad(set_to_none=True)
    assert param.grad.tolist() == [0, 0, 0]
    assert param.grad.data_ptr() == address
