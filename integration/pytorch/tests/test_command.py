"""The command line: what it prints, what it writes, and how it ends."""

import io
import json
import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from stepstack import CheckpointError, OptimizerStep, load_checkpoint, save_checkpoint
from stepstack._command import main
from stepstack_fused_adam import FusedAdamW
from stepstack_sharded_states import ShardedOptimizer


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4)).bfloat16()
    groups = [
        {"params": list(model[0].named_parameters("0"))},
        {"params": list(model[1].named_parameters("1")), "lr": 0},
    ]
    return model, FusedAdamW(groups, lr=0.5, master_weights="fp32")


@pytest.fixture
def trained():
    model, optimizer = make()
    step = OptimizerStep(optimizer)
    for _ in range(3):
        model(torch.randn(8, 16).bfloat16()).sum().backward()
        step()
    return model, optimizer, step


@pytest.fixture
def folder(tmp_path, trained):
    model, _, step = trained
    save_checkpoint(tmp_path / "run", model=model, optimizer=step, step=2)
    save_checkpoint(tmp_path / "run", model=model, optimizer=step, step=3, extra="something")
    return tmp_path / "run"


def test_show_has_a_row_for_each_tensor_of_the_model(folder, capsys):
    assert main(["checkpoint", "show", str(folder)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{folder} has checkpoints of step 2, 3"
    assert printed[1].startswith(f"{folder}/step_3: step 3, written 20")
    assert f"by one rank, torch {torch.__version__}, format 'stepstack checkpoint' 1" in printed[1]
    rows = [line.split("  ") for line in printed if "[" in line]
    rows = {row[0].strip(): [cell.strip() for cell in row[1:] if cell] for row in rows}
    states = "exp_avg float32, exp_avg_sq float32, master_weight float32"
    assert rows["0.weight"] == ["[4, 16]", "bfloat16", states, "3", "896 B"]
    assert rows["1.running_mean"] == ["[4]", "bfloat16", "-", "-", "8 B"]
    assert rows["1.num_batches_tracked"] == ["[]", "int64", "-", "-", "8 B"]
    for line, lr in zip(printed[-3:-1], ("0.5", "0"), strict=True):
        assert line.startswith("2 parameters: ")
        assert f"lr {lr}," in line
    assert printed[-1] == "also saved: optimizer_step, extra"


def test_show_takes_one_checkpoint_or_a_step_of_several(folder, capsys):
    assert main(["checkpoint", "show", str(folder / "step_2")]) == 0
    assert capsys.readouterr().out.startswith(f"{folder}/step_2: step 2")
    assert main(["checkpoint", "show", str(folder), "--step", "2"]) == 0
    assert f"{folder}/step_2: step 2" in capsys.readouterr().out


def test_verify_reads_every_byte_of_all(folder, capsys):
    assert main(["checkpoint", "verify", str(folder)]) == 0
    assert capsys.readouterr().out.count("all as they were written") == 2
    data = folder / "step_2/__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    (folder / "step_4.partial").mkdir()
    assert main(["checkpoint", "verify", str(folder)]) == 1
    printed, said = capsys.readouterr()
    assert said == f"stepstack: {data} is damaged: its contents are not what was written\n"
    assert f"{folder}/step_3: 3 files" in printed
    assert "step_4.partial: a save that did not end" in printed
    assert main(["checkpoint", "verify", str(folder), "--step", "3"]) == 0
    assert main(["checkpoint", "export", str(folder), str(folder / "x.pt"), "--step", "2"]) == 1
    assert not (folder / "x.pt").exists()


def test_an_exported_model_is_a_state_dict(folder, tmp_path, trained, capsys):
    file = tmp_path / "model.pt"
    assert main(["checkpoint", "export", str(folder), str(file)]) == 0
    assert capsys.readouterr().out.startswith(f"{file}: 7 tensors, ")
    torch.testing.assert_close(torch.load(file), dict(trained[0].state_dict()), rtol=0, atol=0)


def test_an_exported_optimizer_loads_into_one_of_torchs(folder, tmp_path, trained):
    file = tmp_path / "run.pt"
    assert main(["checkpoint", "export", str(folder), str(file), "--optimizer"]) == 0
    exported = torch.load(file)
    model, optimizer = make()
    model.load_state_dict(exported["model"])
    optimizer.load_state_dict(exported["optimizer"])
    torch.testing.assert_close(optimizer.state_dict()["state"], trained[1].state_dict()["state"], rtol=0, atol=0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0]
    torchs = torch.optim.AdamW(model[0].parameters())
    torchs.add_param_group({"params": list(model[1].parameters())})
    torchs.load_state_dict(exported["optimizer"])
    assert torchs.state[model[0].bias]["step"] == 3


def test_safetensors_are_written_where_the_library_is(folder, tmp_path, monkeypatch, capsys):
    file = tmp_path / "model.safetensors"
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert main(["checkpoint", "export", str(folder), str(file)]) == 1
    assert "pip install safetensors" in capsys.readouterr().err

    library, saved = ModuleType("safetensors.torch"), []

    def save_file(tensors, filename, metadata=None):
        assert all(type(value) is str for value in metadata.values())
        saved.append((tensors, metadata, filename))
        filename.touch()

    library.save_file = save_file
    monkeypatch.setitem(sys.modules, "safetensors", ModuleType("safetensors"))
    monkeypatch.setitem(sys.modules, "safetensors.torch", library)
    assert main(["checkpoint", "export", str(folder), str(file), "--optimizer"]) == 0
    ((tensors, metadata, _),) = saved
    assert tensors.keys() > {"0.weight", "1.running_var", "state.0.weight.exp_avg", "state.1.bias.master_weight"}
    assert metadata["format"] == "pt"
    assert '"lr": 0.5' in metadata["param_groups"]


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, ShardedOptimizer])
def test_an_exported_optimizer_has_the_frozen_parameters_that_its_run_had(tmp_path, optimizer_class):
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        model[0].weight.requires_grad_(False)
        model[1].bias.requires_grad_(False)
        return model

    model, again = make(), make()
    if optimizer_class is ShardedOptimizer:
        groups = [{"params": list(part.named_parameters(name))} for name, part in model.named_children()]
        optimizer = ShardedOptimizer(groups, torch.optim.AdamW)
    else:
        optimizer = torch.optim.AdamW([{"params": list(part.parameters())} for part in model])
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    save_checkpoint(tmp_path / "run", model=model, optimizer=optimizer)
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "x.pt"), "--optimizer"]) == 0
    exported = torch.load(tmp_path / "x.pt")
    again.load_state_dict(exported["model"])
    plain = torch.optim.AdamW([{"params": list(part.parameters())} for part in again])
    plain.load_state_dict(exported["optimizer"])
    states = [plain.state[param].get("step") for param in again.parameters()]
    assert states == [None, 1, 1, None]


def test_nothing_is_exported_into_a_checkpoint(folder, capsys):
    inside = folder / "step_3" / "model.pt"
    assert main(["checkpoint", "export", str(folder), str(inside)]) == 1
    assert f"{inside} is inside of the checkpoint {folder / 'step_3'}" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(folder)]) == 0


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("where", ["buffer", "parameter", "state"])
def test_a_subclass_of_tensors_is_refused_when_saved_and_found_by_verify(tmp_path, monkeypatch, capsys, where):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    odd, name = torch.ones(2, 3).as_subclass(Subclass), "odd"
    if where == "buffer":
        model.register_buffer("odd", odd)
    elif where == "parameter":
        model.odd = nn.Parameter(odd, requires_grad=False)
    else:
        optimizer.state[model.weight] = {"momentum_buffer": odd}
        name = "momentum_buffer' of 'weight"
    with pytest.raises(CheckpointError, match=rf"'{name}'.* is a .*Subclass: a checkpoint holds plain tensors"):
        save_checkpoint(tmp_path, model=model, optimizer=optimizer)
    assert [*tmp_path.iterdir()] == []
    monkeypatch.setattr("stepstack._states.check_plain", lambda what, tensor: None)  # as it was written once
    save_checkpoint(tmp_path, model=model, optimizer=optimizer)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    assert "' was saved as a " in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"' was saved as a .*Subclass, and nothing but plain tensors is read"):
        load_checkpoint(tmp_path, model=model, optimizer=optimizer)


def test_an_export_that_cannot_be_written_says_so_and_leaves_nothing(folder, tmp_path, monkeypatch, capsys):
    assert main(["checkpoint", "export", str(folder), str(tmp_path / "none" / "model.pt")]) == 1
    assert f"there is no folder {tmp_path}/none\n" in capsys.readouterr().err

    def full(tensors, file):
        file.write_bytes(b"half of it")
        raise RuntimeError("PytorchStreamWriter failed writing file")

    monkeypatch.setattr(torch, "save", full)
    assert main(["checkpoint", "export", str(folder), str(tmp_path / "model.pt")]) == 1
    assert capsys.readouterr().err == "stepstack: PytorchStreamWriter failed writing file\n"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("action", [["show"], ["verify"], ["export", "x.pt"]])
def test_where_there_is_nothing_it_says_so(tmp_path, capsys, action):
    assert main(["checkpoint", action[0], str(tmp_path / "runs"), *action[1:]]) == 1
    assert (
        f"stepstack: {tmp_path}/runs: there is no checkpoint, {tmp_path}/runs is no folder\n" == capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required"),
        (["checkpoint"], "required"),
        (["checkpoint", "export", "runs", "model.bin"], "must end in .pt or .safetensors, not 'model.bin'"),
        (["checkpoint", "show", "runs", "--step", "last"], "invalid int value"),
    ],
)
def test_a_wrong_call_ends_with_2_and_the_usage(capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_it_runs_as_a_module(folder):
    command = [sys.executable, "-W", "error", "-m", "stepstack", "checkpoint", "verify", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count("all as they were written") == 2


@pytest.mark.parametrize("name", ["grö\u00dfe", os.fsdecode(b"\xff\xfe")], ids=["not ASCII", "not UTF-8"])
def test_a_terminal_that_lacks_letters_gets_the_others(tmp_path, monkeypatch, name):
    model = nn.ModuleDict({"größe": nn.Linear(3, 2)})
    folder = tmp_path / name
    save_checkpoint(folder, model=model, optimizer=torch.optim.AdamW(model.parameters()))

    def run(*arguments):
        printed = [io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2)]
        monkeypatch.setattr(sys, "stdout", printed[0])
        monkeypatch.setattr(sys, "stderr", printed[1])
        status = main(["checkpoint", *arguments])
        for stream in printed:
            stream.flush()
        return status, *(stream.buffer.getvalue() for stream in printed)

    status, shown, said = run("show", str(folder))
    assert (status, said) == (0, b"")
    assert b"gr\\xf6\\xdfe.weight  [2, 3]" in shown
    assert run("export", str(folder), str(folder / f"{name}.pt"))[::2] == (0, b"")
    assert torch.load(folder / f"{name}.pt").keys() == model.state_dict().keys()
    status, shown, said = run("show", str(folder / name))
    assert (status, shown) == (1, b"")
    assert b"there is no checkpoint" in said


def test_a_reader_that_has_read_enough_ends_it_quietly(folder):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "stepstack", "checkpoint", "show", str(folder)]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_programs_get_json(folder, tmp_path, capsys):
    assert main(["checkpoint", "show", str(folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["path"], shown["step"], shown["steps"]) == (str(folder / "step_3"), 3, [2, 3])
    states = {"exp_avg": "float32", "exp_avg_sq": "float32", "master_weight": "float32"}
    assert shown["tensors"]["0.weight"] == {"shape": [4, 16], "dtype": "bfloat16", "states": states, "step": 3}
    assert shown["values"]["extra"] == "something"
    assert main(["checkpoint", "export", str(folder), str(tmp_path / "x.pt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 7
    data = folder / "step_2/__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    assert main(["checkpoint", "verify", str(folder), "--json"]) == 1
    verified = json.loads(capsys.readouterr().out)
    assert verified["whole"] == [str(folder / "step_3")]
    assert [*verified["damaged"]] == [str(folder / "step_2")]


def test_it_says_its_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("stepstack 0.")
