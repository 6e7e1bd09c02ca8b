"""Configs that people start from, ten steps each beside DeepSpeed's engine, or refused for a reason."""

import copy
import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from plain import batch, net, weights
from public_configs import REFUSED, TRAINED, filled

from stepstack_deepspeed import initialize
from stepstack_deepspeed._config import read_config
from stepstack_testing import on_ranks

STEPS = 10
DISTANCE = 1e-4
"""Between the ends of both engines, in fp32, as a part of the way from the start."""
ROUNDED = 1e-2
"""The same between weights in bf16."""
BATCH = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
# What trainers say when they bring torch's AdamW, and the examples of DeepSpeed where they bring its own.
THEIRS = {"steps_per_print": 10**9, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_refused_by_its_key(name):
    values, words = REFUSED[name]
    with pytest.raises(ValueError, match=words) as caught:
        read_config(filled(values) | BATCH, ranks=2)
    assert len(str(caught.value)) < 300


@pytest.mark.filterwarnings("ignore:keys of the config that have no effect")
@pytest.mark.parametrize("name", TRAINED)
def test_a_public_config_is_read(name):
    assert read_config(filled(TRAINED[name]) | BATCH, ranks=2).batch.train == 8


def test_the_page_has_each_of_them():
    page = (Path(__file__).parents[3] / "docs" / "coming-from-deepspeed.md").read_text()
    for name in (*TRAINED, *REFUSED):
        assert re.search(rf"^\| {re.escape(name)} \|", page, re.MULTILINE), name


@pytest.mark.engine
@pytest.mark.parametrize("name", TRAINED)
def test_a_public_config_trains_as_with_deepspeed(name):
    ours, theirs = _outcomes()[name]
    assert ours["skipped"] == theirs["skipped"] == 0
    assert ours["lr"] == pytest.approx(theirs["lr"], rel=1e-6)
    start = [param.float() for param in net().parameters()]
    apart = distance(ours["weights"], theirs["weights"]) / distance(start, theirs["weights"])
    assert apart < (ROUNDED if is_round_robin(TRAINED[name]) else DISTANCE)


@cache
def _outcomes():
    pytest.importorskip("stock", reason="needs DeepSpeed: nox -s 'engines(deepspeed)'")
    return on_ranks(2, _train_all, timeout=120.0)[0]


def _train_all(rank):
    import stock

    stock.initialize(rank)
    outcomes = {}
    for name, values in TRAINED.items():
        config = filled(values) | BATCH | THEIRS
        outcomes[name] = (
            _train(initialize, config, rank, weights),
            _train(stock.deepspeed.initialize, _with_a_right_stage_0(config), rank, stock.masters),
        )
    return outcomes


def _with_a_right_stage_0(config):
    """In 16 bits DeepSpeed's stage 0 makes a step of its own, and does not scale the loss: its stage 1 is right."""
    half = any(config.get(key, {}).get("enabled") for key in ("bf16", "fp16"))
    zero = config.get("zero_optimization", {"stage": 0})
    return config | {"zero_optimization": zero | {"stage": 1}} if half and not zero["stage"] else config


def _train(make, config, rank, masters_of):
    model, options = net(), {}
    if "optimizer" not in config:
        options["optimizer"] = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    engine, *_ = make(model=model, config=json.loads(json.dumps(copy.deepcopy(config))), **options)
    for step in range(STEPS):
        engine.backward(engine(*batch(rank, step)))
        engine.step()
    found = engine.module.parameters() if is_round_robin(config) else masters_of(engine)
    return {
        "weights": [weight.detach().float().cpu().clone() for weight in found],
        "skipped": engine.skipped_steps,
        "lr": engine.get_lr(),
    }


def is_round_robin(config):
    """DeepSpeed looks for the masters of one parameter in those of another then."""
    return config.get("zero_optimization", {}).get("round_robin_gradients", False)


def distance(ours, theirs):
    return torch.cat([(a - b).flatten() for a, b in zip(ours, theirs, strict=True)]).norm().item()
