"""Optimizers of others, all classes of pytorch_optimizer and of torch: on slices as in a plain loop, or refused."""

import logging

import pytest
import torch
from torch import nn

from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import on_ranks

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(logging, "lastResort", None)  # it logs what is not installed
    from pytorch_optimizer import optimizer as public
    from pytorch_optimizer.optimizer import OPTIMIZERS

STEPS = 16
SHAPES = ((20, 30), (6, 5, 3, 3), (30,), (17, 23))
SETTINGS = {
    "AdEMAMix": [{"cautious": True}, {"t_alpha_beta3": 20}],
    "ASGD": [{"amplifier": 0.1, "weight_decay": 0.1}],
    "AdaBelief": [{"rectify": True}, {"ams_bound": True}],
    "AdaFactor": [{"relative_step": False, "lr": 0.01, "scale_parameter": False}],
    "AdaGC": [{"warmup_steps": 3}],
    "AdaPNM": [{"ams_bound": False}],
    "AdaShift": [{"keep_num": 3}],
    "Adan": [{"max_grad_norm": 1.0}, {"weight_decay": 0.1}],
    "AdamW": [{"amsgrad": True}],
    "BCOS": [{"mode": "g"}, {"mode": "m"}],
    "BSAM": [{"num_data": 100}],
    "DAdaptAdam": [{"lr": 1.0}],
    "DualAdam": [{"switch_rate": 0.5}],
    "FlashAdamW": [{"quantize": False}],
    "FTRL": [{"lambda_1": 0.01}],
    "GrokFastAdamW": [{"grokfast_after_step": 3}],
    "LaProp": [{"centered": True, "steps_before_using_centered": 2}, {"cautious": True}],
    "Lamb": [{"rectify": True}, {"adam": True}, {"adam": True, "pre_norm": True}],
    "Lion": [{"use_gc": True}, {"cautious": True}, {"weight_decay": 0.1}],
    "MADGRAD": [{"momentum": 0.9, "weight_decay": 0.1}],
    "MARS": [{"optimize_1d": True}, {"mars_type": "lion"}],
    "Prodigy": [{"lr": 1.0, "d0": 0.01}],
    "QHAdam": [{"nus": (0.7, 0.9)}],
    "ROSE": [{"centralize": False, "stabilize": False}],
    "Ranger": [{"use_gc": False}, {"gc_conv_only": True}],
    "Ranger21": [{"num_iterations": 50}],
    "SGDP": [{"momentum": 0.9, "weight_decay": 0.1}],
    "SGDW": [{"momentum": 0.9, "nesterov": True}],
    "SPAM": [{"density": 0.5}, {"update_proj_gap": 3, "warmup_epoch": 2}],
    "ScalableShampoo": [{"start_preconditioning_step": 2, "preconditioning_compute_steps": 1}],
    "ScheduleFreeAdamW": [{"warmup_steps": 5}, {"decoupling_c": 10, "weight_decay": 0.1}],
    "SimplifiedAdEMAMix": [{"beta1_warmup": 10}],
}
PROJECTION = {"rank": 2, "update_proj_gap": 3, "scale": 1.0, "projection_type": "std"}
OF_GROUPS = {
    **{name: [PROJECTION] for name in ("GaLore", "APOLLO", "Fira")},
    **{name: [{"use_muon": True}, {"use_muon": False}] for name in ("Muon", "AdaMuon", "AdaGO", "NorMuon", "MuonClip")},
    "AdamWSN": [{"sn": True}],
}
OF_TORCH = {
    "Adadelta": [{}, {"foreach": True}, {"weight_decay": 0.1}],
    "Adafactor": [{}],
    "Adagrad": [{}, {"foreach": True}, {"fused": True}, {"lr_decay": 0.1}],
    "Adam": [{}, {"amsgrad": True}, {"foreach": True}, {"fused": True}, {"maximize": True}, {"weight_decay": 0.1}],
    "AdamW": [{}, {"amsgrad": True, "fused": True}, {"foreach": True}],
    "Adamax": [{}, {"foreach": True}],
    "ASGD": [{}, {"foreach": True}, {"t0": 3.0}],
    "LBFGS": [{}],
    "Muon": [{}],
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}, {"foreach": True}],
    "RAdam": [{}, {"foreach": True}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.5}, {"foreach": True}],
    "Rprop": [{}, {"foreach": True}],
    "SGD": [{}, {"momentum": 0.9, "nesterov": True}, {"fused": True, "momentum": 0.9}, {"maximize": True}],
    "SparseAdam": [{}],
}


def cases():
    """(class, arguments, options of the group) by what they are called."""
    for optimizer_class in OPTIMIZERS.values():
        name = optimizer_class.__name__
        for options in ({}, *SETTINGS.get(name, ())):
            yield f"{name} {options or ''}".strip(), (optimizer_class, options, {})
        for of_group in OF_GROUPS.get(name, ()):
            yield f"{name}, group {of_group}", (optimizer_class, {}, of_group)
    for name, settings in OF_TORCH.items():
        for options in settings:
            yield f"torch.{name} {options or ''}".strip(), (getattr(torch.optim, name), options, {})


CASES = dict(cases())
GENERATOR = torch.Generator().manual_seed(0)
WEIGHTS = [torch.randn(shape, generator=GENERATOR) * 0.3 for shape in SHAPES]
SIZES = [1.0, 3.0, 0.3, 1.0, 30.0, 1.0, 1e-3, 1.0]
GRADIENTS = [[torch.randn(s, generator=GENERATOR) * SIZES[step % 8] for s in SHAPES] for step in range(STEPS)]


def train(case, wrap):
    """The weights after the steps; what they are not made of is an error's text."""
    optimizer_class, options, of_group = case
    torch.manual_seed(1)
    params = [nn.Parameter(weight.clone()) for weight in WEIGHTS]
    try:
        optimizer = wrap([{"params": params, **of_group}], optimizer_class, **{"lr": 0.01, **options})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    switch(optimizer, "train")
    for gradients in GRADIENTS:
        optimizer.zero_grad()
        sum((param * gradient).sum() for param, gradient in zip(params, gradients, strict=True)).backward()
        optimizer.step()
    switch(optimizer, "eval")
    return [param.detach().clone() for param in params]


def switch(optimizer, mode):
    if hasattr(optimizer, mode):
        getattr(optimizer, mode)()


def plain(params, optimizer_class, **options):
    return optimizer_class(params, **options)


@pytest.fixture(scope="module")
def ends():
    """By case: how it ended in a plain loop, on one process, and on each of two ranks."""
    alone = {name: train(case, ShardedOptimizer) for name, case in CASES.items()}
    accepted = {name: case for name, case in CASES.items() if not isinstance(alone[name], str)}
    loops = {name: train(case, plain) for name, case in accepted.items()}

    def all_cases(rank):
        return {name: train(case, ShardedOptimizer) for name, case in CASES.items()}

    first, second = on_ranks(2, all_cases, timeout=60)
    return {name: (loops.get(name), alone[name], first[name], second[name]) for name in CASES}


def test_every_public_optimizer_ends_as_in_a_plain_loop_or_is_refused_by_name(ends):
    for name, (loop, *ours) in ends.items():
        if loop is None:
            assert all(isinstance(end, str) for end in ours), name
            continue
        for end in ours:
            assert not isinstance(end, str), (name, end)
            for got, expected, start in zip(end, loop, WEIGHTS, strict=True):
                way = float((expected - start).abs().max())
                torch.testing.assert_close(
                    got, expected, rtol=0, atol=2e-6 * way + 1.2e-7, msg=lambda text, name=name: f"{name}: {text}"
                )


ACCEPTED = """
    AccSGD AdaBelief AdaBound AdaDelta Adam AdaMax AdamC AdamG AdaMod AdamW AdamWSN Adan AdaPNM AdaSmooth AdEMAMix
    ADOPT AggMo Ano BCOS DiffGrad DualAdam EXAdam FlashAdamW FOCUS FTRL Grams GrokFastAdamW Kate LaProp Lion
    MADGRAD MSVAG NAdam PAdam PID PNM QHAdam QHM RAdam RMSprop ScheduleFreeAdamW ScheduleFreeRAdam ScheduleFreeSGD
    SGD SGDW SignSGD SimplifiedAdEMAMix SPAM SRMM Tiger VSGD Yogi
"""
"""By their defaults, of pytorch_optimizer."""


def test_public_optimizers_that_are_elementwise_are_accepted(ends):
    accepted = {name for name, (loop, *_) in ends.items() if loop is not None}
    assert {name for name in accepted if name.isalnum()} == set(ACCEPTED.split())
    of_torch = {name for name in ends if name.startswith("torch.")}
    refused = {f"torch.{name}" for name in ("Adafactor", "LBFGS", "Muon", "SparseAdam")}
    assert of_torch - accepted == refused


def test_wrappers_around_other_optimizers_are_refused_by_name():
    wrappers = [
        value
        for name, value in sorted(vars(public).items())
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value not in OPTIMIZERS.values()
    ]
    assert len(wrappers) > 3
    for wrapper in wrappers:
        ends = train((wrapper, {}, {}), ShardedOptimizer)
        assert isinstance(ends, str), wrapper
