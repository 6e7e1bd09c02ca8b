"""A checkpoint on one process: what comes back, what is refused, and that nothing has changed then."""

import io
import pickle
import shutil
from collections import OrderedDict
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

from stepstack import CheckpointError, OptimizerStep, async_save_checkpoint, load_checkpoint, save_checkpoint
from stepstack_fused_adam import FusedAdamW


def make_model(width=16, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(
        OrderedDict(
            first=nn.Conv2d(3, width, 3), norm=nn.BatchNorm2d(width), gelu=nn.GELU(), last=nn.Conv2d(width, 2, 1)
        )
    )
    return model.to(dtype, memory_format=torch.channels_last)


def make(optimizer_class=torch.optim.AdamW, **options):
    model = make_model(dtype=options.pop("dtype", torch.float32))
    groups = [
        {"params": list(model.first.named_parameters("first")), "weight_decay": 0.1},
        {"params": [*model.norm.named_parameters("norm"), *model.last.named_parameters("last")], "lr": 1e-2},
    ]
    return model, optimizer_class(groups, lr=1e-3, **options)


def train(model, optimizer, steps, of=range(100)):
    """Losses of the steps."""
    losses = []
    for step in of[:steps]:
        pictures = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        loss = model(pictures.to(next(model.parameters()).dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def everything(model, optimizer):
    return deepcopy((model.state_dict(), optimizer.state_dict()))


def assert_same(these, those):
    assert type(these) is type(those)
    match these:
        case torch.Tensor():
            torch.testing.assert_close(these, those, rtol=0, atol=0)
        case dict():
            assert these.keys() == those.keys()
            assert_same(list(these.values()), [those[key] for key in these])
        case list() | tuple():
            assert len(these) == len(those)
            for this, that in zip(these, those, strict=True):
                assert_same(this, that)
        case _:
            assert these == those


@pytest.fixture
def trained():
    model, optimizer = make()
    train(model, optimizer, 3)
    return model, optimizer


@pytest.mark.parametrize(
    "optimizer_class", [torch.optim.AdamW, FusedAdamW, torch.optim.SGD, torch.optim.NAdam, torch.optim.Adagrad]
)
def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path, optimizer_class):
    options = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}
    model, optimizer = make(optimizer_class, **options)
    train(model, optimizer, 3)
    assert save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=3) == tmp_path / "step_3"
    model_again, optimizer_again = make(optimizer_class, **options)
    assert load_checkpoint(tmp_path, model=model_again, optimizer=optimizer_again).step == 3
    assert_same(everything(model_again, optimizer_again), everything(model, optimizer))
    assert train(model_again, optimizer_again, 20) == train(model, optimizer, 20)
    assert_same(everything(model_again, optimizer_again), everything(model, optimizer))


def test_before_the_first_step_there_are_no_states_and_a_checkpoint_makes_none(tmp_path):
    model, optimizer = make()
    before = everything(model, optimizer)
    save_checkpoint(tmp_path, model=model, optimizer=optimizer)
    assert_same(everything(model, optimizer), before)
    train(model, optimizer, 2)
    load_checkpoint(tmp_path, model=model, optimizer=optimizer)
    assert_same(everything(model, optimizer), before)


def test_a_parameter_that_was_skipped_has_no_state_afterwards_either(tmp_path, trained):
    model, optimizer = trained
    del optimizer.state[model.last.weight]
    optimizer.state[model.last.bias]["step"] += 7
    save_checkpoint(tmp_path, model=model, optimizer=optimizer)
    model_again, optimizer_again = make()
    load_checkpoint(tmp_path, model=model_again, optimizer=optimizer_again)
    assert not optimizer_again.state.get(model_again.last.weight)
    assert optimizer_again.state[model_again.last.bias]["step"] == 10
    assert optimizer_again.state[model_again.first.bias]["step"] == 3


def test_options_of_groups_go_by_the_parameters_names(tmp_path, trained):
    model, optimizer = trained
    torch.optim.lr_scheduler.LinearLR(optimizer)  # which leaves an initial_lr in the groups
    optimizer.param_groups[0]["betas"] = (0.8, 0.9)
    save_checkpoint(tmp_path, model=model, optimizer=optimizer)
    model_again = make_model()
    groups = [[model_again.last.bias], [model_again.first.weight, model_again.first.bias]]
    groups += [[model_again.norm.weight, model_again.norm.bias], [model_again.last.weight]]
    again = torch.optim.AdamW([{"params": group} for group in groups], fused=True)
    load_checkpoint(tmp_path, model=model_again, optimizer=again)
    assert [group["lr"] for group in again.param_groups] == pytest.approx([1e-2 / 3, 1e-3 / 3, 1e-2 / 3, 1e-2 / 3])
    assert [group["initial_lr"] for group in again.param_groups] == [1e-2, 1e-3, 1e-2, 1e-2]
    assert [group["weight_decay"] for group in again.param_groups] == [0.01, 0.1, 0.01, 0.01]
    assert again.param_groups[1]["betas"] == (0.8, 0.9)
    assert again.param_groups[0]["fused"] is True  # how to run is not what was saved

    words = r"'first\.weight' and 'norm\.weight' .* different .*, lr 0\.0003.* and .*, lr 0\.003.*: make groups"
    with pytest.raises(CheckpointError, match=words) as error:
        load_checkpoint(tmp_path, model=model_again, optimizer=torch.optim.AdamW(model_again.parameters()))
    assert "eps" not in str(error.value)  # which is the same


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.AdamW])
def test_how_weights_decay_stays_as_it_was_constructed(tmp_path, trained, optimizer_class):
    model, optimizer = trained
    save_checkpoint(tmp_path, model=model, optimizer=optimizer)
    model_again, again = make(optimizer_class, weight_decay=0.5)
    load_checkpoint(tmp_path, model=model_again, optimizer=again)
    assert [group["weight_decay"] for group in again.param_groups] == [0.1, 0.01]
    decoupled = optimizer_class is torch.optim.AdamW
    assert [group["decoupled_weight_decay"] for group in again.param_groups] == [decoupled] * 2


def test_scaler_schedule_and_extra_are_carried_along(tmp_path, trained):
    model, optimizer = trained
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    optimizer.step()
    scheduler.step()
    extra = {"seen": 2**40, "best": float("inf"), "betas": (0.9, 0.95), "random": torch.get_rng_state()}
    save_checkpoint(tmp_path, model=model, optimizer=optimizer, scaler=scaler, scheduler=scheduler, extra=extra)

    model_again, optimizer_again = make()
    scaler_again = torch.amp.GradScaler("cpu")
    scheduler_again = torch.optim.lr_scheduler.MultiStepLR(optimizer_again, [1])
    step, extra_again, path = load_checkpoint(
        tmp_path, model=model_again, optimizer=optimizer_again, scaler=scaler_again, scheduler=scheduler_again
    )
    assert (step, path) == (0, tmp_path / "step_0")
    assert_same(extra_again, extra)
    assert scaler_again.get_scale() == 64.0
    assert scheduler_again.state_dict() == scheduler.state_dict()


@pytest.mark.parametrize("on_the_device", [False, True])
def test_an_optimizer_step_brings_its_schedule_and_its_scaler(tmp_path, on_the_device):
    def make_step():
        model, optimizer = make(FusedAdamW)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        if on_the_device:
            schedule = torch.special.exp2
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        return model, OptimizerStep(optimizer, max_norm=1.0, scaler=scaler, lr_scheduler=schedule)

    def go_on(model, step, steps):
        for number in range(steps):
            pictures = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(number))
            step.scaler.scale(model(pictures).square().mean()).backward()
            step()
        return everything(model, step.optimizer), step.scaler.get_scale(), step.applied_steps

    model, step = make_step()
    go_on(model, step, 3)
    save_checkpoint(tmp_path, model=model, optimizer=step)
    model_again, step_again = make_step()
    load_checkpoint(tmp_path, model=model_again, optimizer=step_again)
    assert step_again.applied_steps == 3
    assert_same(go_on(model_again, step_again, 3), go_on(model, step, 3))


def test_names_are_those_inside_of_wrappers(tmp_path, trained):
    model, optimizer = trained
    model.first = torch.compile(model.first, backend="eager")
    save_checkpoint(tmp_path, model=torch.compile(model, backend="eager"), optimizer=optimizer)
    model.first = model.first._orig_mod
    model_again, optimizer_again = make()
    load_checkpoint(tmp_path, model=model_again, optimizer=optimizer_again)
    assert_same(everything(model_again, optimizer_again), everything(model, optimizer))


def test_numbers_are_rounded_to_what_they_are_read_into(tmp_path, trained):
    model, optimizer = trained
    save_checkpoint(tmp_path, model=model, optimizer=optimizer)
    small = make_model(dtype=torch.bfloat16)
    load_checkpoint(tmp_path, model=small)
    assert torch.equal(small.first.weight, model.first.weight.bfloat16())


def test_masters_and_weights_stand_in_for_each_other(tmp_path):
    small, with_masters = make(FusedAdamW, dtype=torch.bfloat16, master_weights="fp32")
    train(small, with_masters, 3)
    save_checkpoint(tmp_path, model=small, optimizer=with_masters)
    masters = [with_masters.state[param]["master_weight"] for param in small.parameters()]

    whole, without = make()
    load_checkpoint(tmp_path, model=whole, optimizer=without)
    assert_same(list(map(torch.Tensor.detach, whole.parameters())), masters)
    assert not any("master_weight" in state for state in without.state.values())

    save_checkpoint(tmp_path, model=whole, optimizer=without)
    small_again, remainders = make(FusedAdamW, dtype=torch.bfloat16, master_weights="remainder")
    load_checkpoint(tmp_path, model=small_again, optimizer=remainders)
    saved = remainders.state_dict()["state"]
    assert_same([saved[number]["master_weight"] for number in saved], masters)


def test_what_is_not_given_is_not_loaded(tmp_path, trained):
    model, optimizer = trained
    save_checkpoint(tmp_path, model=model, optimizer=optimizer, extra="only this", step=5)
    assert load_checkpoint(tmp_path) == (5, "only this", tmp_path / "step_5")
    model_again = make_model()
    load_checkpoint(tmp_path / "step_5", model=model_again)
    assert_same(model_again.state_dict(), model.state_dict())


def test_the_newest_is_loaded_and_old_ones_are_kept_by_count(tmp_path, trained):
    model, optimizer = trained
    for step in (8, 9, 10, 11):
        save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=step, keep=3)
    assert {path.name for path in tmp_path.iterdir()} == {"step_9", "step_10", "step_11"}
    assert load_checkpoint(tmp_path).step == 11
    assert load_checkpoint(tmp_path, step=9).step == 9
    save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=2, keep=1)  # of a run that went back
    assert {path.name for path in tmp_path.iterdir()} == {"step_2"}
    assert save_checkpoint(tmp_path, model=model, optimizer=optimizer).name == "step_3"


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path, trained):
    model, optimizer = trained
    for extra in ("old", "new"):
        save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=1, extra=extra)
    assert load_checkpoint(tmp_path).extra == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_a_save_beside_training_has_what_was_there_when_it_began(tmp_path, trained):
    model, optimizer = trained
    before = everything(model, optimizer)
    pending = [async_save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=3)]
    train(model, optimizer, 2)
    pending.append(async_save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=5))
    after = everything(model, optimizer)
    train(model, optimizer, 2)
    assert [future.result().name for future in pending] == ["step_3", "step_5"]
    for step, saved in ((3, before), (5, after)):
        load_checkpoint(tmp_path, model=model, optimizer=optimizer, step=step)
        assert_same(everything(model, optimizer), saved)


def test_a_save_beside_training_that_fails_says_so_and_the_next_one_works(tmp_path, trained):
    model, optimizer = trained
    (tmp_path / "file").touch()
    pending = async_save_checkpoint(tmp_path / "file", model=model, optimizer=optimizer)
    with pytest.raises(CheckpointError, match="is no folder"):
        pending.result()
    assert async_save_checkpoint(tmp_path, model=model, optimizer=optimizer).result() == tmp_path / "step_0"


def test_torchs_own_reader_can_read_it(tmp_path, trained):
    model, optimizer = trained
    path = save_checkpoint(tmp_path, model=model, optimizer=optimizer)
    state = {"model": make_model().state_dict()}
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        torch.distributed.checkpoint.load(state, checkpoint_id=path)
    assert_same(state["model"], model.state_dict())


class Harm:
    """Pickled, this is an instruction to make a file."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return Path.touch, (self._path,)


@pytest.mark.parametrize("harm", ["metadata", "tensor"])
def test_nothing_that_a_file_says_is_run(tmp_path, trained, harm):
    model, optimizer = trained
    path = save_checkpoint(tmp_path / "run", model=model, optimizer=optimizer)
    harmed = tmp_path / "harmed"
    if harm == "metadata":
        path.joinpath(".metadata").write_bytes(pickle.dumps(Harm(harmed)))
    else:
        buffer = io.BytesIO()
        torch.save(Harm(harmed), buffer)
        data = path / "__0_0.distcp"
        data.write_bytes(buffer.getvalue().ljust(data.stat().st_size, b"\0"))
        metadata = pickle.loads(path.joinpath(".metadata").read_bytes())
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, len(buffer.getvalue())
        path.joinpath(".metadata").write_bytes(pickle.dumps(metadata))
    sign(path)
    with pytest.raises(CheckpointError, match=r"not allowed|nothing but plain tensors is read"):
        load_checkpoint(path, model=model, optimizer=optimizer)
    assert not harmed.exists()


def sign(path):
    """Give a folder a marker that fits, whatever is in it."""
    from stepstack import _folder

    shutil.copytree(path, path.with_suffix(".partial"))
    shutil.rmtree(path)
    aside = path.with_suffix(".partial")
    (aside / "checkpoint.json").unlink()
    files = {file.name: file.read_bytes() for file in aside.iterdir()}
    records = {}
    for name, data in files.items():
        (aside / name).unlink()
        records[name] = _folder.write(aside / name, data)
    _folder.finish(aside, step=0, ranks=1, files=records)
