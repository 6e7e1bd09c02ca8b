"""The sums of squares by squares.c, one pass over memory on the CPU."""

import ctypes
import warnings
from functools import cache
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from stepstack_gradnorm import _library, _torch
from stepstack_gradnorm._memory import is_dense, start
from stepstack_gradnorm._torch import flat, summed

_SOURCE = Path(__file__).with_name("squares.c")
_FUNCTIONS = {
    torch.float32: "stepstack_squares_fp32",
    torch.bfloat16: "stepstack_squares_bf16",
    torch.float16: "stepstack_squares_fp16",
}
_CHUNK = 2**18  # elements that a thread reads at a time
_WORTH_A_THREAD = 2**20  # elements: to make a thread costs some ten microseconds, to read these a few hundred


def missing(device: torch.device) -> str | None:
    """Why it can't be used on a device here, or None. Compiles nothing."""
    if device.type != "cpu":
        return f"it is for CPUs; on {device.type} the torch backend is one pass over memory as well"
    found = _loaded() if _loaded.cache_info().currsize else _library.missing(_SOURCE)
    return found if isinstance(found, str) else None


def failure() -> str | None:
    """Why the library can't be loaded, or None. It is compiled if need be."""
    found = _loaded()
    return found if isinstance(found, str) else None


@cache
def is_here() -> bool:
    """Whether the library can be loaded, after compiling it if need be. If not, there is a warning, once."""
    if reason := failure():
        warnings.warn(
            f"stepstack_gradnorm: squares.c can't be used, so the slower torch backend measures norms: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
    return reason is None


def refuses(dtype: torch.dtype) -> str | None:
    """Why it does not take a dtype, or None."""
    return None if dtype in _FUNCTIONS else f"it is for fp32, bf16 and fp16, not for {dtype}"


def sums_of_squares(lists: list[list[Tensor]]) -> Tensor:
    """What `_torch.sums_of_squares` says, which does it if no library loads or memory can't be seen.

    In each of 32 lanes, 32 squares at a time are added up in fp32 and these sums in fp64; all in fp64 if squares leave
    the range of fp32. The number of threads does not change a bit.
    """
    library = _loaded()
    dense = [t if t.is_contiguous() or is_dense(t) else t.contiguous() for t in flat(lists)]
    starts, sizes = [start(t) for t in dense], [t.numel() for t in dense]
    if isinstance(library, str) or min(starts) < 0:
        return _torch.sums_of_squares(lists)
    dtype, counts = dense[0].dtype, [len(tensors) for tensors in lists]
    if max(sizes) > _CHUNK:
        cuts = [range(0, size, _CHUNK) for size in sizes]
        pieces = map(len, cuts)
        counts = [sum(islice(pieces, count)) for count in counts]
        starts = [at + dtype.itemsize * offset for at, cut in zip(starts, cuts, strict=True) for offset in cut]
        sizes = [min(_CHUNK, size - offset) for size, cut in zip(sizes, cuts, strict=True) for offset in cut]
    return summed(_read(library, dtype, starts, sizes), counts)


def _read(library: ctypes.CDLL, dtype: torch.dtype, starts: list[int], sizes: list[int]) -> Tensor:
    count = len(starts)
    sums = torch.empty(count, dtype=torch.float64)
    getattr(library, _FUNCTIONS[dtype])(
        (ctypes.c_void_p * count)(*starts),
        (ctypes.c_int64 * count)(*sizes),
        ctypes.c_int64(count),
        ctypes.c_void_p(sums.data_ptr()),
        ctypes.c_int(min(torch.get_num_threads(), max(1, sum(sizes) // _WORTH_A_THREAD))),
    )
    return sums


@cache
def _loaded() -> ctypes.CDLL | str:
    return _library.load(_SOURCE)
