"""A small GPT over bytes, and the text it learns: the source code of Python's standard library."""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

SIZES = {
    "tiny": {"layers": 2, "width": 32, "heads": 2, "context": 32},
    "small": {"layers": 4, "width": 128, "heads": 4, "context": 128},
    "large": {"layers": 12, "width": 768, "heads": 12, "context": 1024},
}


class GPT(nn.Module):
    """Bytes (batch, length) → logits of the byte that follows each (batch, length, 256)."""

    def __init__(self, *, layers, width, heads, context):
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        for weight in self.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=0.02)
        frequencies = 1e4 ** -torch.linspace(0, 1, width // heads // 2)
        angles = torch.outer(torch.arange(context), frequencies)
        self.register_buffer("rotation", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def forward(self, text):
        x = self.embedding(text)
        for block in self.blocks:
            x = block(x, self.rotation[:, : text.shape[1]])
        return self.norm(x) @ self.embedding.weight.T

    def loss(self, text):
        """The mean of −log p(next byte), in nats: text is (batch, length + 1)."""
        return F.cross_entropy(self(text[:, :-1]).float().flatten(0, 1), text[:, 1:].flatten())

    @torch.no_grad()
    def generate(self, start, *, length, temperature=0.8):
        """`start`, and what the model thinks comes next."""
        text = torch.tensor([list(start)], device=self.embedding.weight.device)
        for _ in range(length):
            logits = self(text[:, -self.context :])[0, -1].float()
            text = torch.cat([text, torch.multinomial((logits / temperature).softmax(0), 1)[None]], dim=1)
        characters = bytes(text[0].tolist()).decode(errors="replace")
        return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in characters)


class Block(nn.Module):
    """Attention, then a feed-forward layer; each reads a normalised `x` and adds to it."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x, rotation):
        mixed = self.query_key_value(self.attention_norm(x))
        query, key, value = mixed.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key = rotate(query, *rotation), rotate(key, *rotation)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.feed_forward_norm(x))))


def rotate(x, cos, sin):
    """Positions as rotations of pairs of channels (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def standard_library():
    """Two tensors of bytes, for training and validation: all modules in order, every tenth is for validation."""
    paths = list(modules(Path(sysconfig.get_path("stdlib"))))
    return read(path for i, path in enumerate(paths) if i % 10), read(paths[::10])


def modules(folder):
    """The Python files in a folder and, unless they are tests or of somebody else, in those below it."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in ("site-packages", "dist-packages", "test", "tests"):
            yield from modules(path)
        elif path.suffix == ".py":
            yield path


def read(paths):
    return torch.frombuffer(bytearray(b"\0".join(path.read_bytes() for path in paths)), dtype=torch.uint8)


def batch(text, *, sequences, length, seed):
    """Pieces of the text (sequences, length + 1). Which ones follows from the seed: there's no position to remember."""
    starts = torch.randint(len(text) - length, (sequences, 1), generator=torch.Generator().manual_seed(seed))
    return text[starts + torch.arange(length + 1)].long()
