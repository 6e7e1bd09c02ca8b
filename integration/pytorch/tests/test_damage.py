"""Damage of any file of a checkpoint is found, named, and changes nothing."""

import json
import random
import shutil

import pytest
import torch
from torch import nn

from stepstack import CheckpointError, OptimizerStep, _folder, load_checkpoint, save_checkpoint
from stepstack_fused_adam import FusedAdamW

FILES = [".metadata", "__0_0.distcp", "values.json", "checkpoint.json"]


def make(width=8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    model, optimizer = make()
    return save_checkpoint(tmp_path_factory.mktemp("run"), model=model, optimizer=optimizer, extra={"step": 1})


@pytest.fixture
def checkpoint(written, tmp_path):
    return shutil.copytree(written, tmp_path / written.name)


@pytest.fixture
def refused(checkpoint):
    """That a load is refused, in the words of a pattern, and has changed nothing."""
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)

    def states():
        return [*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]

    def check(pattern, model=model, optimizer=optimizer, **options):
        before, lr_before = [tensor.clone() for tensor in states()], scheduler.state_dict()
        with pytest.raises(CheckpointError, match=pattern):
            load_checkpoint(checkpoint.parent, model=model, optimizer=optimizer, **options)
        for tensor, tensor_before in zip(states(), before, strict=True):
            assert torch.equal(tensor, tensor_before)
        assert scheduler.state_dict() == lr_before

    return check


def test_there_are_no_other_files(checkpoint):
    assert sorted(path.name for path in checkpoint.iterdir()) == sorted(FILES)


@pytest.mark.parametrize("file", FILES)
def test_a_byte_that_changed_is_found(checkpoint, refused, file):
    data = bytearray(checkpoint.joinpath(file).read_bytes())
    data[len(data) // 2] ^= 1
    checkpoint.joinpath(file).write_bytes(data)
    refused(rf"step_0/{file} is damaged")


@pytest.mark.parametrize("file", FILES)
def test_any_byte_that_changed_is_found(checkpoint, file):
    data = checkpoint.joinpath(file).read_bytes()
    random.seed(0)
    for place in {0, len(data) - 1, *random.choices(range(len(data)), k=300)}:
        changed = bytearray(data)
        changed[place] ^= random.randrange(1, 256)
        checkpoint.joinpath(file).write_bytes(changed)
        with pytest.raises(ValueError, match=f"{file} is damaged"):
            _folder.verify(checkpoint)
    checkpoint.joinpath(file).write_bytes(data)
    _folder.verify(checkpoint)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("left", ["all but one", "half", "nothing"])
def test_a_file_that_was_cut_off_is_found(checkpoint, refused, file, left):
    data = checkpoint.joinpath(file).read_bytes()
    count = {"all but one": len(data) - 1, "half": len(data) // 2, "nothing": 0}[left]
    checkpoint.joinpath(file).write_bytes(data[:count])
    refused(rf"step_0/{file} is damaged")


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_gone_is_missed(checkpoint, refused, file):
    checkpoint.joinpath(file).unlink()
    refused(rf"step_0 has no {file}" if file == "checkpoint.json" else rf"step_0/{file} is missing")


def test_a_file_of_another_checkpoint_is_noticed(checkpoint, refused, tmp_path):
    model, optimizer = make()
    model[0].weight.data += 1
    other = save_checkpoint(tmp_path / "other", model=model, optimizer=optimizer)
    data = checkpoint / "__0_0.distcp"
    assert data.stat().st_size == other.joinpath(data.name).stat().st_size
    shutil.copy(other / data.name, data)
    refused("__0_0.distcp is damaged: its contents are not what was written")
    shutil.copy(other / data.name, checkpoint / "__1_0.distcp")
    refused("step_0/__1_0.distcp is not a part of the checkpoint")


def test_another_format_is_refused_by_its_version(checkpoint, refused):
    marker = json.loads(checkpoint.joinpath("checkpoint.json").read_text())
    del marker["crc32"]
    marker["version"] = 2
    said = json.dumps(marker, indent=1).removesuffix("\n}").encode()
    checkpoint.joinpath("checkpoint.json").write_bytes(said + _folder._CHECKSUM.encode() + _folder._tail(said))
    refused("version 2; this stepstack reads 'stepstack checkpoint', version 1")


def test_a_folder_without_a_checkpoint_has_none(checkpoint, refused):
    refused("no checkpoint of step 7, only of 0", step=7)
    checkpoint.rename(checkpoint.with_suffix(".partial"))
    refused("there is no checkpoint")


def test_a_parameter_too_many_or_too_few_is_named(refused):
    model, _ = make()
    model.append(nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.named_parameters())
    refused(r"the model has '2\.bias', '2\.weight', which the checkpoint lacks", model=model, optimizer=optimizer)
    model = nn.Sequential(model[0])
    optimizer = torch.optim.AdamW(model.named_parameters())
    refused(r"the checkpoint has '1\.bias', '1\.weight', which the model lacks", model=model, optimizer=optimizer)
    model, _ = make()
    optimizer = torch.optim.AdamW([model[0].weight, model[0].bias])
    refused(r"the checkpoint has '1\.bias', '1\.weight', which the optimizer lacks", model=model, optimizer=optimizer)


def test_another_shape_is_named(refused):
    model, optimizer = make(width=9)
    refused(
        r"'0\.weight' of the model has shape \(9, 4\), in the checkpoint \(8, 4\)", model=model, optimizer=optimizer
    )


def test_numbers_of_another_kind_are_named(refused):
    model, _ = make()
    model[0].weight = nn.Parameter(torch.zeros(8, 4, dtype=torch.int32), requires_grad=False)
    refused(r"'0\.weight' of the model is of torch\.int32, in the checkpoint of torch\.float32", model, None)


@pytest.mark.parametrize(
    ("optimizer_class", "missing"),
    [
        (torch.optim.SGD, "momentum_buffer"),
        (torch.optim.Adagrad, "sum"),
        (torch.optim.RMSprop, "square_avg"),
        (torch.optim.Adafactor, "col_var"),
        (torch.optim.NAdam, "mu_product"),
    ],
)
def test_states_of_another_kind_of_optimizer_are_refused(refused, tmp_path, optimizer_class, missing):
    options = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}
    model, _ = make()
    optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
    refused(rf"exp_avg_sq, step of '0\.weight', but no {missing}: it was written by another kind", model, optimizer)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "other", model=model, optimizer=optimizer)
    if optimizer_class is torch.optim.NAdam:  # has all that AdamW needs
        return
    for reader in (torch.optim.AdamW, FusedAdamW):
        model, _ = make()
        before = model[0].weight.detach().clone()
        with pytest.raises(CheckpointError, match="but no exp_avg: it was written by another kind"):
            load_checkpoint(tmp_path / "other", model=model, optimizer=reader(model.parameters()))
        assert torch.equal(model[0].weight, before)


def test_what_was_not_saved_is_not_loaded(refused):
    refused("the checkpoint was saved without scaler", scaler=torch.amp.GradScaler("cpu"))
    model, optimizer = make()
    refused("without optimizer_step: give the optimizer that is in it", model=model, optimizer=OptimizerStep(optimizer))


def test_who_refuses_what_was_saved_for_him_keeps_what_he_had(tmp_path):
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    save_checkpoint(tmp_path, model=model, optimizer=optimizer, scaler=scaler, scheduler=scheduler)
    weight, scale = model[0].weight.detach().clone(), torch.amp.GradScaler("cpu", init_scale=4.0)
    torch.nn.init.zeros_(model[0].weight)
    scheduler.last_epoch = 77
    with pytest.raises(CheckpointError, match="source state dict is empty"):
        load_checkpoint(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler, scaler=scale)
    assert (scheduler.last_epoch, scale.get_scale()) == (77, 4.0)
    assert not model[0].weight.any()
    assert weight.any()


@pytest.mark.parametrize("in_the_step", [True, False], ids=["in the step", "apart"])
def test_a_schedule_of_another_kind_is_refused_and_changes_nothing(tmp_path, in_the_step):
    def saved_with(schedule):
        model, optimizer = make()
        scheduler = schedule(optimizer)
        step = OptimizerStep(optimizer, lr_scheduler=scheduler if in_the_step else None)
        others = {} if in_the_step else {"scheduler": scheduler}
        return {"model": model, "optimizer": step, **others}, scheduler

    contents, _ = saved_with(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2))
    save_checkpoint(tmp_path, **contents)
    contents, scheduler = saved_with(lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5))
    before = scheduler.state_dict()
    with pytest.raises(CheckpointError, match=r"another kind of scheduler than this CosineAn.*: it has gamma, st"):
        load_checkpoint(tmp_path, **contents)
    assert scheduler.state_dict() == before


class Several(torch.optim.SGD):
    """A container's state dict."""

    def state_dict(self):
        return {0: super().state_dict()}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"step": -1}, "step must be an integer of at least 0, or None; got -1"),
        ({"step": 1.5}, "step must be"),
        ({"step": True}, "step must be"),
        ({"keep": 0}, "keep must be an integer of at least 1"),
        ({"dir": None}, "NoneType"),
        ({"extra": {"when": object()}}, r"extra\['when'\] is a builtins\.object"),
        ({"scaler": 2.0}, "scaler has no state_dict"),
        ({"optimizer": None}, "give both"),
        ({"model": nn.GELU()}, "the model has neither parameters nor buffers"),
        ({"model": nn.Linear(1, 1)}, r"parameter 0 of the optimizer's group 0, of shape \(8, 4\), is not in the model"),
    ],
    ids=lambda value: "",
)
def test_what_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path, options, said):
    model, optimizer = make()
    with pytest.raises(CheckpointError, match=said):
        save_checkpoint(**{"dir": tmp_path / "run", "model": model, "optimizer": optimizer, **options})
    assert not (tmp_path / "run").exists()


def test_several_optimizers_in_one_are_refused(tmp_path):
    model, _ = make()
    with pytest.raises(CheckpointError, match=r"state dict of Several has 0, not torch's 'state' and"):
        save_checkpoint(tmp_path / "run", model=model, optimizer=OptimizerStep(Several(model.parameters())))


@pytest.mark.parametrize(
    ("buffer", "said"),
    [
        (torch.eye(3).to_sparse(), "sparse or quantized: a checkpoint takes dense tensors"),
        (torch.ones(1).expand(3), "expanded, many elements in one place: make it a tensor of its own"),
        (torch.empty(3, device="meta"), "on the meta device: give the model memory first"),
    ],
    ids=["sparse", "expanded", "meta"],
)
def test_a_tensor_that_is_not_there_as_a_whole_is_named_and_nothing_is_read(tmp_path, buffer, said):
    model, optimizer = make()
    model.register_buffer("cache", torch.ones(3))
    save_checkpoint(tmp_path, model=model, optimizer=optimizer)
    model.cache = buffer
    before = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight += 1
    for call in (save_checkpoint, load_checkpoint):
        with pytest.raises(CheckpointError, match=f"'cache' of the model is {said}"):
            call(tmp_path, model=model, optimizer=optimizer)
    assert torch.equal(model[0].weight, before + 1)
