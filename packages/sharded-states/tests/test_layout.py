"""Where parameters lie: arithmetic only."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from stepstack_sharded_states._layout import BLOCK, Entry, arrival_order, dense_stride, plan

numels = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 2), st.sampled_from(["fp32", "bf16"])), min_size=1)
shards_of = st.integers(1, 7)


def entries_of(numels, shards):
    return [Entry(numel, group, None, kind, shards, itemsize=4) for numel, group, kind in numels]


@given(numels, shards_of, st.integers(1, 20_000))
def test_every_element_is_in_one_piece_of_one_bucket(numels, shards, capacity):
    entries = entries_of(numels, shards)
    buckets = plan(entries, capacity)
    assert sorted(index for bucket in buckets for index in bucket.members) == list(range(len(entries)))
    for bucket in buckets:
        assert len({entries[index].kind for index in bucket.members}) == 1
        for position, index in enumerate(bucket.members):
            pieces = [bucket.piece(position, shard) for shard in range(shards)]
            owned = [i for start, stop in pieces for i in range(start, stop)]
            assert owned == list(range(bucket.starts[position], bucket.stops[position]))
            assert bucket.stops[position] - bucket.starts[position] == math.ceil(entries[index].numel / BLOCK) * BLOCK
            for shard, (start, stop) in enumerate(pieces):
                assert start % BLOCK == stop % BLOCK == 0
                assert shard * bucket.slice_numel <= start <= stop <= (shard + 1) * bucket.slice_numel


@given(numels, shards_of)
def test_members_touch_and_are_sorted_by_group(numels, shards):
    entries = entries_of(numels, shards)
    for bucket in plan(entries, capacity=10_000):
        assert bucket.starts[1:] == bucket.stops[:-1]
        groups = [entries[index].group for index in bucket.members]
        assert groups == sorted(groups)


@given(numels, shards_of, st.integers(1, 20_000))
def test_another_run_lays_out_alike_though_hashes_are_others(numels, shards, capacity):
    others = {"fp32": object(), "bf16": object()}
    renamed = [(numel, group, others[kind]) for numel, group, kind in numels]
    assert plan(entries_of(numels, shards), capacity) == plan(entries_of(renamed, shards), capacity)


@given(numels, shards_of, st.integers(1, 20_000))
def test_slices_are_as_even_as_blocks_allow(numels, shards, capacity):
    for bucket in plan(entries_of(numels, shards), capacity):
        assert BLOCK <= bucket.numel - bucket.stops[-1] < BLOCK * (shards + 1)


def test_two_groups_arrive_side_by_side():
    layers = [Entry(100, 0, None, "fp32", 1, 4)] * 4 + [Entry(10, 1, None, "fp32", 1, 4)] * 4
    assert arrival_order(layers) == [7, 3, 6, 2, 5, 1, 4, 0]


@given(st.permutations(range(4)), st.tuples(*[st.integers(1, 4)] * 4))
def test_a_dense_tensor_keeps_its_order_of_axes(order, shape):
    x = torch.empty([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(4)])
    assert dense_stride(x.shape, x.stride()) == x.stride()


def test_a_tensor_with_gaps_or_overlaps_becomes_contiguous():
    for x in (torch.empty(4, 6)[:, ::2], torch.empty(4, 1).expand(4, 3)):
        assert dense_stride(x.shape, x.stride()) == (3, 1)


def test_buckets_are_even():
    layouts = plan([Entry(1000, 0, None, "fp32", 2, 4)] * 10, capacity=3 * 4096)
    assert [len(layout.members) for layout in layouts] == [3, 2, 3, 2]
