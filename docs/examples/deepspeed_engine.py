"""A training script with DeepSpeed's calls and a DeepSpeed config, that needs no DeepSpeed.

    python deepspeed_engine.py                                     # one process
    torchrun --nproc-per-node 2 deepspeed_engine.py --stage 2      # two, each with half of Adam's states and gradients
    torchrun --nproc-per-node 2 deepspeed_engine.py --resume runs/deepspeed-engine

Of a script that runs with DeepSpeed, one line is other: the import. The model learns to write the source code of
Python's standard library, byte by byte; it and the text are in gpt.py.
"""

import argparse
import sys

import torch
import torch.distributed as dist
from gpt import GPT, SIZES, standard_library
from torch import nn
from torch.utils.data import Dataset

import stepstack_deepspeed as deepspeed  # was: import deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 20, "total_num_steps": 200}},
}

READ_EVERY = 20  # micro-batches


def main():
    options = read_options()
    torch.manual_seed(0)
    model = WithLoss(GPT(**SIZES[options.size]).to(torch.bfloat16))
    engine, _, dataloader, _ = deepspeed.initialize(
        model=model,
        config=CONFIG | {"zero_optimization": {"stage": options.stage}},
        training_data=Text(standard_library()[0], length=SIZES[options.size]["context"]),
    )
    if options.resume:
        path, client_state = engine.load_checkpoint(options.resume)
        if path is None:
            sys.exit(f"There is no checkpoint in {options.resume}.")
        say(f"Going on from {path}, where the loss was {client_state['loss']:.2f}.")

    losses = []
    for batch in dataloader:
        if engine.global_steps >= options.steps:
            break
        loss = engine(batch.to(engine.device))
        engine.backward(loss)
        engine.step()  # every second one is a step of the optimizer: gradient_accumulation_steps
        losses.append(loss.detach())
        # Nothing has waited for the device so far; to make numbers of tensors does, so it is done now and then.
        if len(losses) % READ_EVERY == 0:
            norm, (lr,) = engine.get_global_grad_norm().item(), engine.get_lr()
            say(f"step {engine.global_steps}: loss {mean_of_last(losses):.3f}, gradient norm {norm:.2f}, lr {lr:.1e}")
    if losses:
        path = engine.save_checkpoint(options.out, client_state={"loss": mean_of_last(losses)})
        say(f"{path}. To go on: --resume {options.out}, on as many processes and in whatever stage you like.")
    engine.destroy()
    dist.destroy_process_group()


def mean_of_last(losses):
    return torch.stack(losses[-READ_EVERY:]).mean().item()


class WithLoss(nn.Module):
    """A model whose forward gives the loss, as DeepSpeed's examples have it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, text):
        return self.model.loss(text)


class Text(Dataset):
    """Pieces of a text, one after the other, each with the byte that follows."""

    def __init__(self, text, length):
        self.text, self.length = text, length

    def __len__(self):
        return (len(self.text) - 1) // self.length

    def __getitem__(self, number):
        start = number * self.length
        return self.text[start : start + self.length + 1].long()


def say(words):
    """One of the processes speaks for all."""
    if dist.get_rank() == 0:
        print(words)


def read_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, choices=range(4), default=1, help="of ZeRO")
    parser.add_argument("--steps", type=int, default=200, help="to stop after")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model")
    parser.add_argument("--out", default="runs/deepspeed-engine", metavar="DIR", help="for the checkpoint")
    parser.add_argument("--resume", metavar="DIR", help="a folder with checkpoints, to go on from the latest")
    return parser.parse_args()


if __name__ == "__main__":
    main()
