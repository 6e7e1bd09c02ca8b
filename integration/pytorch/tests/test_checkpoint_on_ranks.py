"""A run that is saved on some ranks goes on, on others, as if nothing had been."""

import re
import shutil

import gpt
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from stepstack import (
    CheckpointError,
    OptimizerStep,
    _folder,
    _storage,
    async_save_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from stepstack_fused_adam import FusedAdamW
from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import RankError, on_ranks

SEQUENCES = 12  # of all ranks
BEFORE, AFTER = 3, 20
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.95)}


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return gpt.GPT(**gpt.SIZES["tiny"]).to(dtype)


def groups_of(model):
    named = list(model.named_parameters())
    return [
        {"params": [(name, param) for name, param in named if param.ndim > 1], "weight_decay": 0.1},
        {"params": [(name, param) for name, param in named if param.ndim == 1], "weight_decay": 0.0, "lr": 2e-3},
    ]


def sharded(mesh=None, dtype=torch.float32, optimizer_class=FusedAdamW, **options):
    model = make_model(dtype)
    mesh = init_device_mesh("cpu", mesh) if mesh else None
    return model, ShardedOptimizer(groups_of(model), optimizer_class, mesh=mesh, **OPTIONS, **options)


def replicated():
    model = DistributedDataParallel(make_model())
    return model, torch.optim.AdamW(groups_of(model), fused=True, **OPTIONS)


def fsdp2(mesh):
    model = make_model()
    for block in (*model.blocks, model):
        fully_shard(block, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=("a", "b")[: len(mesh)]))
    return model, torch.optim.AdamW(groups_of(model), fused=True, **OPTIONS)


def alone():
    model = make_model()
    return model, torch.optim.AdamW(groups_of(model), fused=True, **OPTIONS)


WAYS = {
    "sharded over 1": (1, lambda: sharded(bucket_cap_mb=0.02)),
    "sharded over 2": (2, lambda: sharded(bucket_cap_mb=0.05, optimizer_class=torch.optim.AdamW, fused=True)),
    "sharded over 3": (3, lambda: sharded(bucket_cap_mb=0.01)),
    "sharded over 2, twice": (4, lambda: sharded((2, 2), bucket_cap_mb=0.02)),
    "DDP over 2": (2, replicated),
    "FSDP2 over 2": (2, lambda: fsdp2((2,))),
    "FSDP2 over 2, twice": (4, lambda: fsdp2((2, 2))),
    "plain AdamW": (1, alone),
}


def train(model, optimizer, steps):
    """The loss of all ranks in each step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    step = OptimizerStep(optimizer, max_norm=0.5)
    losses = []
    for number in steps:
        text = torch.randint(256, (SEQUENCES, 33), generator=torch.Generator().manual_seed(number))
        mine = text.tensor_split(ranks)[rank]
        logits = model(mine[:, :-1]).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()
        step()
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return mean / ranks


def run_on(way, function, *arguments):
    ranks, make = WAYS[way]
    return on_ranks(ranks, lambda rank: function(*make(), *arguments))[0]


def save(model, optimizer, folder):
    losses = train(model, optimizer, range(BEFORE))
    save_checkpoint(folder, model=model, optimizer=optimizer, step=BEFORE, extra=losses)


def go_on(model, optimizer, folder):
    step, losses, _ = load_checkpoint(folder, model=model, optimizer=optimizer)
    return torch.cat([losses, train(model, optimizer, range(step, step + AFTER))])


@pytest.fixture(scope="module")
def unbroken():
    """The losses of one process with torch's own optimizer."""
    return run_on("plain AdamW", train, range(BEFORE + AFTER))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder that somebody has saved into."""
    folders = {}

    def folder(way):
        if way not in folders:
            folders[way] = tmp_path_factory.mktemp("run")
            run_on(way, save, folders[way])
        return folders[way]

    return folder


PAIRS = [(writer, list(WAYS)[(place + away) % len(WAYS)]) for place, writer in enumerate(WAYS) for away in (1, 3)]


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_a_run_goes_on_in_another_way(written, unbroken, writer, reader):
    losses = run_on(reader, go_on, written(writer))
    torch.testing.assert_close(losses, unbroken, rtol=0, atol=1e-5)


def test_a_save_beside_training_has_what_was_there_when_it_began(tmp_path, unbroken):
    def save_and_go_on(model, optimizer):
        losses = train(model, optimizer, range(BEFORE))
        pending = async_save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=BEFORE, extra=losses)
        train(model, optimizer, range(BEFORE, BEFORE + 3))
        assert pending.result() == tmp_path / "step_3"

    run_on("sharded over 2", save_and_go_on)
    torch.testing.assert_close(run_on("sharded over 3", go_on, tmp_path), unbroken, rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", ["sharded over 2, twice", "FSDP2 over 2, twice"])
def test_each_number_is_written_once_and_ranks_share_the_work(written, way):
    path = written(way) / "step_3"
    metadata = _storage.read_metadata(path, _folder.read_marker(path))
    for entry in metadata.state_dict_metadata.values():
        assert sum(chunk.sizes.numel() for chunk in entry.chunks) == entry.size.numel()
    sizes = [file.stat().st_size for file in path.glob("*.distcp")]
    assert max(sizes) < 0.7 * sum(sizes)


def errors_of(ranks, function):
    """What ranks raise: all of them the same, a CheckpointError."""
    with pytest.raises(RankError) as raised:
        on_ranks(ranks, function)
    errors = raised.value.errors
    assert sorted(errors) == list(range(ranks))
    assert {type(error) for error in errors.values()} == {CheckpointError}
    (words,) = {str(error) for error in errors.values()}
    return words


def test_a_rank_that_cannot_write_lets_all_fail_and_the_next_save_works(tmp_path):
    def save_twice(rank):
        model, optimizer = sharded()
        train(model, optimizer, range(1))
        save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=1)
        write = _storage._Summed.write
        if rank == 1:
            _storage._Summed.write = no_space
        try:
            save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=2)
        except CheckpointError:
            _storage._Summed.write = write
            assert load_checkpoint(tmp_path, model=model, optimizer=optimizer).step == 1
            save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=3)
            raise

    def no_space(*_):
        raise OSError(28, "No space left on device")

    assert errors_of(2, save_twice) == "rank 1: OSError: [Errno 28] No space left on device"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_3"]


@pytest.mark.parametrize("harm", ["a byte", "a name", "a shape", "an option"])
def test_a_refusal_is_the_same_on_all_ranks_and_changes_nothing(written, tmp_path, harm):
    folder = shutil.copytree(written("sharded over 3"), tmp_path / "run")
    if harm == "a byte":
        file = folder / "step_3/__1_0.distcp"
        data = bytearray(file.read_bytes())
        data[-100] ^= 255
        file.write_bytes(data)

    def load(rank):
        torch.manual_seed(0)
        model = gpt.GPT(**{**gpt.SIZES["tiny"], "layers": 1 + (harm != "a name"), "context": 32})
        if harm == "a shape":
            model.norm = torch.nn.RMSNorm(31)
        groups = list(model.named_parameters()) if harm == "an option" else groups_of(model)
        optimizer = ShardedOptimizer(groups, torch.optim.AdamW, **OPTIONS)
        before = [tensor.clone() for tensor in model.state_dict().values()]
        try:
            load_checkpoint(folder, model=model, optimizer=optimizer)
        finally:
            assert not optimizer.state
            assert all(map(torch.equal, before, model.state_dict().values()))

    said = {
        "a byte": "rank . __1_0.distcp is damaged",
        "a name": "the checkpoint has 'blocks.1.attention_norm.weight', .* which the model lacks",
        "a shape": "'norm.weight' of the model has shape .31,., in the checkpoint .32,.",
        "an option": "are in group 0 of the optimizer, but have different options",
    }
    words = errors_of(2, load)
    assert re.search(said[harm].replace("rank . ", "rank .: .*"), words)


def test_two_things_of_one_name_are_not_saved(tmp_path):
    def save(rank):
        model = torch.nn.Linear(4, 8 + rank)
        save_checkpoint(tmp_path / "run", model=model, optimizer=torch.optim.AdamW(model.parameters()))

    words = errors_of(2, save)
    assert "'model.weight' is (8, 4), torch.float32 on rank 0 and (9, 4), torch.float32 on rank 1" in words


def test_ranks_that_give_other_things_than_others_are_told(tmp_path):
    def load(rank):
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        save_checkpoint(tmp_path, model=model, optimizer=optimizer)
        load_checkpoint(tmp_path, model=model, **({"optimizer": optimizer} if rank else {}))

    assert errors_of(2, load) == "rank 1 has 'optimizer', which rank 0 has not: give all ranks the same"


def test_ranks_with_other_parts_of_a_model_save_apart(tmp_path):
    def save(rank, together):
        model = torch.nn.ModuleDict({f"stage {rank}": torch.nn.Linear(4, 4)})
        run = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        if together:
            save_checkpoint(tmp_path / "all", **run)
        stages = [dist.new_group([0]), dist.new_group([1])]
        save_checkpoint(tmp_path / f"{rank}", **run, process_group=stages[rank], step=rank)
        return load_checkpoint(tmp_path / f"{rank}", **run, process_group=stages[rank]).step

    assert on_ranks(2, save, False) == [0, 1]
    words = "rank 1 has 'param_groups.stage 1.bias.amsgrad', which rank 0 has not: ranks with other parts .* save apart"
    assert re.match(words, errors_of(2, lambda rank: save(rank, True)))


def test_in_the_middle_of_accumulation_nothing_is_saved(tmp_path):
    def save_early(rank):
        model, optimizer = sharded()
        train(model, optimizer, range(1))
        model.loss(torch.zeros(1, 33, dtype=torch.long)).backward()
        save_checkpoint(tmp_path, model=model, optimizer=optimizer)

    assert "gradient" in errors_of(2, save_early)


def test_ctrl_c_while_a_rank_writes_stays_what_it_is_there_and_the_others_hear_of_it(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    def check(rank):
        model, optimizer = sharded()
        if rank == 1:
            monkeypatch.setattr(_storage._Summed, "write", interrupt)
        with pytest.raises(KeyboardInterrupt if rank == 1 else CheckpointError) as error:
            save_checkpoint(tmp_path, model=model, optimizer=optimizer)
        return str(error.value)

    told, _, also_told = on_ranks(3, check)
    assert told == also_told
    assert "rank 1: KeyboardInterrupt" in told
    assert not [*tmp_path.iterdir()]
