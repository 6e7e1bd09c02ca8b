"""Weights in files, whole and without the frozen ones, and tags of ranks that differ."""

import pytest
import torch
from plain import RANKS, engine_of, net, train

from stepstack import CheckpointError
from stepstack_testing import on_ranks


def whole(param):
    return (param.full_tensor() if hasattr(param, "full_tensor") else param).detach()


def test_tags_that_differ_among_ranks_are_told_as_the_config_says(tmp_path):
    def on_rank(rank):
        for said in ("Fail", "Warn", "Ignore"):
            engine = engine_of(checkpoint={"tag_validation": said})
            if said == "Fail":
                with pytest.raises(ValueError, match=r"the tag of rank 0 is 'a0', but rank 1 says 'a1'"):
                    engine.save_checkpoint(tmp_path / said, tag=f"a{rank}")
            else:
                engine.save_checkpoint(tmp_path / said, tag=f"a{rank}")

    on_ranks(RANKS, on_rank)
    assert {path.parent.name for path in tmp_path.glob("*/a0")} == {"Warn", "Ignore"}
    assert not list(tmp_path.glob("*/a1"))


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters_may_be_left_out_of_a_checkpoint_and_left_alone_by_a_load(tmp_path, stage):
    def frozen():
        model = net()
        model.first.requires_grad_(False)
        return engine_of(model=model, stage=stage, dtype="bf16")

    def on_rank(rank):
        engine = frozen()
        train(engine, rank)
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
        other = frozen()
        with pytest.raises(CheckpointError, match="first"):
            other.load_checkpoint(tmp_path)
        other.load_checkpoint(tmp_path, load_module_strict=False)
        train(engine, rank, 1)
        train(other, rank, 1)
        pairs = zip(*(each.module.parameters() for each in (engine, other)), strict=True)
        return [torch.equal(whole(a), whole(b)) for a, b in pairs]

    assert all(map(all, on_ranks(RANKS, on_rank)))


@pytest.mark.parametrize("stage", range(4))
def test_weights_are_written_and_taken_whole(tmp_path, stage):
    def on_rank(rank):
        engine = engine_of(stage=stage, dtype="bf16")
        train(engine, rank)
        assert engine.save_16bit_model(tmp_path, "all.bin")
        assert engine.save_fp16_model(tmp_path)
        weights = torch.load(tmp_path / "all.bin")
        assert {name: value.shape for name, value in weights.items()} == {
            name: value.shape for name, value in net().state_dict().items()
        }
        assert {value.dtype for value in weights.values()} == {torch.bfloat16}
        other = engine_of(stage=stage, dtype="bf16")
        other.load_module_state_dict({"module": weights})
        same = [
            torch.equal(whole(a).bfloat16(), whole(b).bfloat16())
            for a, b in zip(*(each.module.parameters() for each in (engine, other)), strict=True)
        ]
        train(other, rank, 1)  # from masters that were taken too
        again = torch.cat(
            [(whole(p).float() - weights[n].float()).flatten() for n, p in other.module.named_parameters()]
        )
        return all(same), again.abs().max().item()

    for same, moved in on_ranks(RANKS, on_rank):
        assert same
        assert 0 < moved < 1e-2
