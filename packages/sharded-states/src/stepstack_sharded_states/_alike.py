"""What all ranks of a mesh must be given alike, as lines of text; and how one that refuses it tells the others."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from stepstack_sharded_states._mesh import Ranks
from stepstack_sharded_states._params import Group

_READ = 64  # elements of a tensor that are compared, beside its shape and dtype


@contextmanager
def announced(ranks: Callable[[], tuple[Ranks, torch.device]]) -> Iterator[None]:
    """What is raised in here is raised on the other ranks too, where they compare what they were given."""
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # of the others, or for want of a mesh: this rank has an error of its own to raise
            mesh, device = ranks()
            mesh.compare([], device, refusal=error)
        raise


def likely_ranks(mesh: DeviceMesh | None, groups: Sequence[Group]) -> tuple[Ranks, torch.device]:
    """Who compares, and where: on the parameters' device, or, where those are not known, where the others' will be."""
    devices = [param.device for group in groups for _, param in group.params if param.device.type != "meta"]
    if not devices and mesh is not None:
        devices = [torch.device(mesh.device_type)]
    elif not devices:
        has_gpus = torch.cuda.is_available() and "nccl" in dist.get_backend_config()
        devices = [torch.device("cuda" if has_gpus else "cpu")]
    return Ranks(mesh, devices[0].type if mesh is None else mesh.device_type), devices[0]


def lines(what: str, values: Mapping[str, Any]) -> list[str]:
    """One for each value, without what may differ: addresses, and the numbers of devices."""
    return [f"{what} {name} = {text(value)}" for name, value in sorted(values.items(), key=lambda item: str(item[0]))]


def text(value: Any) -> str:
    """A value as ranks may compare it. Reads small tensors, for which it waits."""
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, str):
        return repr(re.sub(r"^([a-z]+):\d+$", r"\1", value))  # a device, perhaps
    if value is None or isinstance(value, bytes | Number | torch.dtype):
        return repr(value)
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, Tensor):
        readable = value.numel() <= _READ and type(value) in (Tensor, torch.nn.Parameter) and not value.is_meta
        return f"tensor {value.dtype} {tuple(value.shape)} {value.detach().tolist() if readable else ''}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(lines('', value))}}}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(text, value))})"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(text, value)))}}}"
    if isinstance(value, partial):
        return f"partial {text(value.func)} {text(value.args)} {text(value.keywords)}"
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
