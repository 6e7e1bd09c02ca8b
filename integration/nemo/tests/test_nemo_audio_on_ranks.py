"""Beside the real NeMo: its diffusion-style NCSN++, with channels_last weights."""

import json
import math
import wave
from array import array

import pytest
import torch

from stepstack_testing import on_ranks

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]  # NeMo and what it imports warn of much

ADAM = {"lr": 1e-3, "betas": [0.9, 0.98], "weight_decay": 0.001}
OURS = {"name": "stepstack_distributed_fused_adam", **ADAM}
TORCHS = {"name": "adamw", **ADAM}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A manifest of four tones, noisy and clean."""
    folder = tmp_path_factory.mktemp("pairs")
    lines = []
    for number in range(4):
        paths = {}
        for kind, noise in (("noisy", 1200), ("clean", 0)):
            samples = [
                int(7000 * math.sin(2 * math.pi * (300 + 90 * number) * i / 16000) + noise * math.sin(i * i))
                for i in range(9600)
            ]
            paths[kind] = folder / f"{number}-{kind}.wav"
            with wave.open(str(paths[kind]), "wb") as file:
                file.setparams((1, 2, 16000, len(samples), "NONE", ""))
                file.writeframes(array("h", samples).tobytes())
        lines.append({"noisy_filepath": str(paths["noisy"]), "clean_filepath": str(paths["clean"]), "duration": 0.6})
    manifest = folder / "train.json"
    manifest.write_text("\n".join(map(json.dumps, lines)))
    return str(manifest)


def config(manifest, optim):
    transforms = "nemo.collections.audio.modules.transforms"
    spectrum = {"fft_length": 254, "hop_length": 128}
    return {
        "sample_rate": 16000,
        "skip_nan_grad": False,
        "train_ds": {
            "manifest_filepath": manifest,
            "input_key": "noisy_filepath",
            "target_key": "clean_filepath",
            "audio_duration": 0.5,
            "random_offset": False,
            "batch_size": 1,
            "shuffle": False,
            "num_workers": 0,
        },
        "encoder": {"_target_": f"{transforms}.AudioToSpectrogram", **spectrum},
        "decoder": {"_target_": f"{transforms}.SpectrogramToAudio", **spectrum},
        "estimator": {
            "_target_": "nemo.collections.audio.parts.submodules.ncsnpp"
            ".SpectrogramNoiseConditionalScoreNetworkPlusPlus",
            "in_channels": 1,
            "out_channels": 1,
            "channels": [8, 16, 16],
            "num_resolutions": 2,
            "num_res_blocks": 1,
            "conditioned_on_time": False,
            "pad_time_to": 16,
        },
        "loss": {"_target_": "nemo.collections.audio.losses.audio.MSELoss", "ndim": 3},
        "metrics": {},
        "optim": optim,
    }


@pytest.fixture
def fit(fit_beside_nemo, pairs):
    """Train NCSN++ on the tones: (rank, ranks, optim, converted, …)."""
    models = pytest.importorskip(
        "nemo.collections.audio.models.enhancement", reason="NeMo is not here: nox -s 'engines(nemo)'"
    )
    omegaconf = pytest.importorskip("omegaconf")

    def fit_ncsnpp(rank, ranks, optim, converted, **more):
        strides = []

        def make(trainer):
            model = models.PredictiveAudioToAudioModel(
                cfg=omegaconf.OmegaConf.create(config(pairs, optim)), trainer=trainer
            )
            model = model.to(memory_format=torch.channels_last) if converted else model
            model.on_train_end = lambda: strides.extend(p.stride() for p in model.parameters())
            return model

        losses, values, *_ = fit_beside_nemo(rank, ranks, make, **more)
        return losses, values, sum(len(stride) == 4 and stride[1] == 1 and stride[3] > 1 for stride in strides)

    return fit_ncsnpp


def test_channels_last_weights_train_as_contiguous_ones_under_torch_and_stay_so(fit):
    common = {"steps": 4, "clip": 1.0}
    reference = on_ranks(2, lambda rank: fit(rank, 2, TORCHS, False, ours=False, **common), timeout=60.0)
    found = on_ranks(2, lambda rank: fit(rank, 2, OURS, True, **common), timeout=60.0)
    for (losses, values, converted), (their_losses, their_values, _) in zip(found, reference, strict=True):
        assert converted >= 8  # the 3×3 convolutions
        assert losses == pytest.approx(their_losses, rel=1e-4)
        assert (values - their_values).norm() < 1e-4 * their_values.norm()


@pytest.mark.parametrize("converted", [True, False])
def test_a_checkpoint_is_resumed_in_the_other_memory_format(fit, tmp_path, converted):
    path, common = str(tmp_path / "at-the-end-of-an-epoch.ckpt"), {"clip": 1.0}
    whole = on_ranks(2, lambda rank: fit(rank, 2, OURS, converted, steps=6, save_to=path, **common), timeout=60.0)
    rest = on_ranks(2, lambda rank: fit(rank, 2, OURS, not converted, steps=6, resume=path, **common), timeout=60.0)
    for (losses, values, _), (all_losses, all_values, _) in zip(rest, whole, strict=True):
        assert losses == pytest.approx(all_losses[4:], rel=1e-4)
        assert (values - all_values).norm() < 1e-4 * all_values.norm()
