"""What a checkpoint holds beside its tensors, as JSON: every value comes back as it was, or is refused by name.

A value that JSON has no form for becomes an object with one key that begins with `$`:

    (0.9, 0.95)               {"$tuple": [0.9, 0.95]}
    float("inf")              {"$float": "inf"}
    torch.bfloat16            {"$dtype": "bfloat16"}
    torch.tensor(3e-4)        {"$tensor": 0.0003000000142492354, "dtype": "float32", "shape": []}
    Counter({30: 1})          {"$counter": [[30, 1]]}
    {30: "a"}                 {"$dict": [[30, "a"]]}
"""

import json
import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

LARGEST_TENSOR = 65_536
"""Elements. What is larger belongs into the model or the optimizer, whose tensors every rank writes its share of."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def to_text(values: dict[str, Any]) -> str:
    """Named values as JSON.

    They may consist of None, bool, int, float, str, list, tuple, dict, Counter, torch.dtype and small tensors of real
    numbers, which come back on the CPU. TypeError or ValueError says, by name, what is something else.
    """
    encoded = {}
    for name, value in values.items():
        try:
            encoded[name] = _encoded(value, name)
        except RecursionError:
            raise ValueError(f"{name} is nested too deeply to be held as JSON, or contains itself") from None
    return json.dumps(encoded, allow_nan=False, indent=1)


def from_text(text: str) -> Any:
    """What `to_text` was given."""
    return json.loads(text, object_hook=_decoded)


def _encoded(value: Any, name: str) -> Any:
    match value:
        case None | bool() | str():
            return value
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        case torch.dtype():
            return {"$dtype": str(value).removeprefix("torch.")}
        case Tensor():
            return _encoded_tensor(value, name)
        case Counter():
            return {"$counter": _pairs(value, name)}
        case dict() if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encoded(part, f"{name}[{key!r}]") for key, part in value.items()}
        case dict():
            return {"$dict": _pairs(value, name)}
        case list() if type(value) is list:
            return [_encoded(part, f"{name}[{number}]") for number, part in enumerate(value)]
        case tuple() if type(value) is tuple:
            return {"$tuple": _encoded(list(value), name)}
    raise TypeError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint can't hold as JSON: it "
        "takes None, bool, int, float, str, list, tuple, dict, Counter, torch.dtype and small tensors (.item() makes a "
        "number of one of numpy's, torch.as_tensor a tensor of its arrays)"
    )


def _pairs(value: dict[Any, Any], name: str) -> Any:
    return _encoded([[key, part] for key, part in value.items()], name)


def _encoded_tensor(tensor: Tensor, name: str) -> dict[str, Any]:
    if isinstance(tensor, DTensor) or tensor.layout is not torch.strided or tensor.is_complex():
        raise TypeError(f"{name} is a tensor that is spread over ranks, sparse or complex: it can't be held as JSON")
    if tensor.numel() > LARGEST_TENSOR:
        raise ValueError(
            f"{name} is a tensor of {tensor.numel():,} elements, and as JSON at most {LARGEST_TENSOR:,} are held: make "
            "it a buffer of the model"
        )
    numbers = tensor.detach().cpu()  # waits for the device: a file needs the numbers
    numbers = numbers.double() if numbers.is_floating_point() else numbers
    return {
        "$tensor": _encoded(numbers.tolist(), name),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),  # which [] does not tell
    }


def _decoded(coded: dict[str, Any]) -> Any:
    match coded:
        case {"$float": number}:
            return float(number)
        case {"$tuple": parts}:
            return tuple(parts)
        case {"$dtype": dtype}:
            return _DTYPES[dtype]
        case {"$tensor": numbers, "dtype": dtype, "shape": shape}:
            # By way of fp64, which holds every number of the others: they round back to what they were.
            wide = torch.float64 if _DTYPES[dtype].is_floating_point else _DTYPES[dtype]
            return torch.tensor(numbers, dtype=wide).to(_DTYPES[dtype]).reshape(shape)
        case {"$counter": pairs}:
            return Counter(dict(map(tuple, pairs)))
        case {"$dict": pairs}:
            return dict(map(tuple, pairs))
    return coded
