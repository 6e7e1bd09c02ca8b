"""Checkpoints: a run that is interrupted goes on as if it had not been, on any number of ranks and in any stage."""

import pytest
import torch
from plain import batch, config, net
from torch.optim.lr_scheduler import LambdaLR

from stepstack import CheckpointError
from stepstack_deepspeed import initialize
from stepstack_testing import on_ranks

SCHEDULE = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": 12, "warmup_max_lr": 0.01}}


def engine_of(ranks, stage=1, dtype="fp16", **more):
    """Twelve samples a step, whatever the ranks."""
    values = config(stage=stage, dtype=dtype, scheduler=SCHEDULE) | {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4 // ranks,
    }
    return initialize(model=net(), config=values, **more)[0]


def train(engine, rank, steps):
    for step in range(engine.global_steps, engine.global_steps + steps):
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(*batch(rank * engine.gradient_accumulation_steps() + micro, step))
            engine.backward(loss * float("nan") if step == 1 else loss)
            engine.step()


def said(engine):
    return {
        "counts": (
            engine.global_steps,
            engine.micro_steps // engine.gradient_accumulation_steps(),
            engine.skipped_steps,
        ),
        "lr": engine.get_lr(),
        "scale": engine.loss_scale(),
        "params": [
            (param.full_tensor() if hasattr(param, "full_tensor") else param).detach().float().clone()
            for param in engine.module.parameters()
        ],
    }


def save(rank, folder, stage, dtype):
    engine = engine_of(2, stage, dtype)
    train(engine, rank, 3)
    engine.save_checkpoint(folder, client_state={"epoch": 7, "seen": [1, 2]})
    train(engine, rank, 3)
    return said(engine)


def go_on(rank, folder, ranks, stage, dtype):
    engine = engine_of(ranks, stage, dtype)
    path, client_state = engine.load_checkpoint(folder)
    train(engine, rank, 3)
    return path.parent.name, client_state, said(engine)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path, stage, dtype):
    whole = on_ranks(2, save, tmp_path, stage, dtype)
    resumed = on_ranks(2, go_on, tmp_path, 2, stage, dtype)
    for expected, (tag, client_state, got) in zip(whole, resumed, strict=True):
        assert (tag, client_state) == ("global_step3", {"epoch": 7, "seen": [1, 2]})
        assert got["counts"] == expected["counts"] == (6, 6, 1)
        assert (got["lr"], got["scale"]) == (expected["lr"], expected["scale"])
        assert all(map(torch.equal, got["params"], expected["params"]))


@pytest.mark.parametrize(("before", "after"), [((2, 1), (1, 1)), ((2, 2), (4, 1)), ((2, 1), (2, 3)), ((2, 3), (1, 0))])
def test_a_run_goes_on_with_another_number_of_ranks_or_in_another_stage(tmp_path, before, after):
    (ranks, stage), (other_ranks, other_stage) = before, after
    expected, *_ = on_ranks(ranks, save, tmp_path, stage, "fp32")
    (_, _, got), *_ = on_ranks(other_ranks, go_on, tmp_path, other_ranks, other_stage, "fp32")
    assert got["counts"] == expected["counts"]
    assert got["lr"] == pytest.approx(expected["lr"])
    for ours, theirs in zip(got["params"], expected["params"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_parts_of_a_checkpoint_may_be_left_out(tmp_path):
    def on_rank(rank):
        engine = engine_of(2)
        train(engine, rank, 3)
        engine.save_checkpoint(tmp_path, tag="three", save_latest=False)
        module_only, no_states, no_schedule = engine_of(2), engine_of(2), engine_of(2)
        module_only.load_checkpoint(tmp_path, "three", load_module_only=True)
        no_states.load_checkpoint(tmp_path, "three", load_optimizer_states=False)
        no_schedule.load_checkpoint(tmp_path, "three", load_lr_scheduler_states=False)
        train(module_only, rank, 1)  # from the checkpoint's weights, or the masters would undo that
        return [said(each) for each in (engine, module_only, no_states, no_schedule)]

    for saved, module_only, no_states, no_schedule in on_ranks(2, on_rank):
        assert module_only["counts"] == (1, 1, 0)
        distance = max((a - b).abs().max().item() for a, b in zip(module_only["params"], saved["params"], strict=True))
        assert distance < 1e-3
        assert no_states["counts"] == no_schedule["counts"] == saved["counts"]
        assert no_states["lr"] == saved["lr"] != no_schedule["lr"] == [0]
        assert no_states["scale"] == 256
        for each in (no_states, no_schedule):
            assert all(map(torch.equal, each["params"], saved["params"]))


def test_without_a_checkpoint_nothing_is_loaded(tmp_path, caplog):
    engine, *_ = initialize(model=net(), config=config(), dist_init_required=False)
    assert engine.load_checkpoint(tmp_path) == (None, None)
    assert "latest does not exist, and no tag was given" in caplog.text
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(tmp_path, "none")


def test_a_checkpoint_of_the_same_tag_replaces_the_older_one(tmp_path):
    engine, *_ = initialize(model=net(), config=config(), dist_init_required=False)
    for epoch in range(2):
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path, tag="best", client_state={"epoch": epoch})
    assert engine.load_checkpoint(tmp_path) == (tmp_path / "best" / "step_2", {"epoch": 1})
    assert (tmp_path / "latest").read_text() == "best"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "latest"]
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["step_2"]


def test_a_scheduler_of_torch_goes_on_too(tmp_path):
    def engine_and_schedule():
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, fused=True)
        scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
        return initialize(
            model=model, config=config(), optimizer=optimizer, lr_scheduler=scheduler, dist_init_required=False
        )[0]

    engine = engine_and_schedule()
    train(engine, 0, 3)
    engine.save_checkpoint(tmp_path)
    other = engine_and_schedule()
    other.load_checkpoint(tmp_path)
    for each in (engine, other):
        train(each, 0, 3)
    assert other.get_lr() == engine.get_lr() == [0.5**5]  # one was skipped
    assert all(map(torch.equal, engine.module.parameters(), other.module.parameters()))


def test_a_checkpoint_without_a_schedule_does_not_continue_one(tmp_path):
    engine, *_ = initialize(model=net(), config=config(), dist_init_required=False)
    engine.save_checkpoint(tmp_path)
    scheduled, *_ = initialize(model=net(), config=config(scheduler=SCHEDULE), dist_init_required=False)
    with pytest.raises(CheckpointError, match="saved without a schedule: load_lr_scheduler_states=False"):
        scheduled.load_checkpoint(tmp_path)


@pytest.mark.parametrize("tag", ["", ".", "..", "a/../../b", "/tmp/a", "latest"])
def test_a_tag_is_the_name_of_a_folder_inside(tmp_path, tag):
    engine, *_ = initialize(model=net(), config=config(), dist_init_required=False)
    with pytest.raises(ValueError, match=r"tag is .*: it must be the name of a folder inside of save_dir"):
        engine.save_checkpoint(tmp_path, tag=tag)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_has_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine, *_ = initialize(model=net(), config=config(), dist_init_required=False)
    for call, argument in (
        (engine.save_checkpoint, "save_dir"),
        (engine.load_checkpoint, "load_dir"),
        (engine.save_16bit_model, "save_dir"),
    ):
        for nothing in ("", None):
            with pytest.raises(ValueError, match=f"{argument} is {nothing!r}: it must be the path of a folder"):
                call(nothing)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_latest_is_an_error(tmp_path):
    engine, *_ = initialize(model=net(), config=config(), dist_init_required=False)
    (tmp_path / "latest").write_text("\n")
    with pytest.raises(CheckpointError, match="latest is empty: give a tag"):
        engine.load_checkpoint(tmp_path)


def test_another_kind_of_schedule_is_refused_and_may_begin_anew(tmp_path):
    engine, *_ = initialize(model=net(), config=config(scheduler=SCHEDULE), dist_init_required=False)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    other, *_ = initialize(
        model=net(),
        config=config(),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step),
        dist_init_required=False,
    )
    with pytest.raises(CheckpointError, match="saved with another kind of schedule: load_lr_scheduler_states=False"):
        other.load_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert (other.get_lr(), other.global_steps) == ([pytest.approx(2e-3)], 1)
