"""Train a small speech recogniser of NeMo's on tones, with the optimizer that nemo_ctc.yaml names.

    python nemo_ctc.py
    python nemo_ctc.py trainer.devices=2 trainer.accelerator=cpu
    python nemo_ctc.py model.optim.store_param_remainders=true trainer.precision=bf16-true

Words on the command line change the config.
"""

import json
import math
import sys
import tempfile
import wave
from array import array
from pathlib import Path

import stepstack_nemo  # noqa: F401  # registers the optimizer and the strategy

try:
    from lightning.pytorch import Trainer
    from nemo.collections.asr.models import EncDecCTCModel
    from omegaconf import OmegaConf
except ImportError as error:
    raise SystemExit(f"this example needs NeMo: {error}") from error

TONES = {"a": 220, "b": 330, "c": 440, "d": 550}
RATE = 16000


def main():
    config = OmegaConf.merge(OmegaConf.load(Path(__file__).with_suffix(".yaml")), OmegaConf.from_cli(sys.argv[1:]))
    with tempfile.TemporaryDirectory(prefix="tones-") as folder:
        config.model.train_ds.manifest_filepath = str(make_tones(Path(folder)))
        trainer = Trainer(**config.trainer)
        model = EncDecCTCModel(cfg=config.model, trainer=trainer)
        trainer.fit(model)
        if trainer.is_global_zero:
            print(f"loss after {trainer.global_step} steps: {trainer.callback_metrics['train_loss']:.3f}")


def make_tones(folder, count=16):
    """A manifest of recordings: each letter is a quarter of a second of its tone."""
    lines = []
    for number in range(count):
        text = "".join("abcd"[(number * (place + 1)) % 4] for place in range(3))
        samples = [int(9000 * math.sin(2 * math.pi * TONES[c] * i / RATE)) for c in text for i in range(RATE // 4)]
        path = folder / f"{number}.wav"
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, RATE, len(samples), "NONE", ""))
            file.writeframes(array("h", samples).tobytes())
        lines.append(json.dumps({"audio_filepath": str(path), "duration": len(samples) / RATE, "text": text}))
    manifest = folder / "train.json"
    manifest.write_text("\n".join(lines))
    return manifest


if __name__ == "__main__":
    main()
