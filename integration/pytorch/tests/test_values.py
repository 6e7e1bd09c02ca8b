"""Values as JSON: they come back as they were, or are refused by name."""

import json
import math
from collections import Counter, OrderedDict, namedtuple
from functools import reduce
from pathlib import Path

import pytest
import torch

from stepstack._values import LARGEST_TENSOR, from_text, to_text

VALUES = [
    None,
    True,
    -(2**70),
    0.1,
    -0.0,
    5e-324,
    float("inf"),
    float("-inf"),
    "Stufe\n\0",
    [],
    (),
    (0.9, 0.95),
    [(1, [2]), {"a": (None,)}],
    {"lr": 1e-3, "$tuple": [1]},
    {"$float": "no number"},
    {30: "a", (1, 2): "b", "c": 1},
    torch.bfloat16,
    {"milestones": Counter({30: 1, 60: 2})},
]
TENSORS = [
    torch.tensor(3e-4),
    torch.tensor([1.5, float("inf")], dtype=torch.bfloat16),
    torch.tensor([[2**62 + 1], [-1]]),
    torch.tensor(True),
    torch.rand(7, dtype=torch.float64),
    torch.randn(3, 5).half(),
    torch.empty(0, 3, dtype=torch.uint8),
    torch.get_rng_state(),
]


def again(value):
    text = to_text({"extra": value})
    json.loads(text, parse_constant=pytest.fail)  # nothing that only Python reads
    return from_text(text)["extra"]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_as_it_was(value):
    back = again(value)
    assert back == value
    assert repr(back) == repr(value)  # tuples are no lists, -0.0 is no 0.0


def test_a_nan_comes_back_as_one():
    assert math.isnan(again({"loss": math.nan})["loss"])


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}")
def test_a_small_tensor_comes_back_bit_by_bit(tensor):
    back = again({"t": tensor})["t"]
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_kinds_of_numbers_and_dicts_come_back_as_plain_ones():
    assert again(OrderedDict(a=1)) == {"a": 1}
    numpy = pytest.importorskip("numpy")
    assert again(numpy.float64(0.1)) == 0.1


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"out": [Path("runs")]}, r"extra\['out'\]\[0\] is a pathlib\..*PosixPath"),
        ({"f": len}, r"extra\['f'\] is a builtins\.builtin_function_or_method"),
        ((1, {2}), r"extra\[1\] is a builtins\.set"),
        (namedtuple("Point", "x")(1), "extra is a .*Point"),
        ({Path("a"): 1}, r"extra\[0\]\[0\] is a pathlib"),
        (reduce(lambda inside, _: [inside], range(5_000), 0), "extra is nested too deeply"),
        ({"z": torch.tensor(1j)}, r"extra\['z'\] is a tensor that is spread over ranks, sparse or complex"),
        ({"w": torch.zeros(LARGEST_TENSOR + 1)}, r"extra\['w'\] is a tensor of 65,537 elements"),
    ],
    ids=lambda value: "",
)
def test_what_json_cannot_hold_is_refused_by_name(extra, said):
    with pytest.raises((TypeError, ValueError), match=said):
        to_text({"extra": extra})
