"""The sums of squares by squares.c, which the machine's own compiler translates when they are first asked for."""

import ctypes
import os
import shutil
import subprocess
import warnings
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from stepstack_gradnorm import _torch
from stepstack_gradnorm._memory import is_dense, start
from stepstack_gradnorm._torch import flat, summed

_FUNCTIONS = {torch.float32: "sums_fp32", torch.bfloat16: "sums_bf16", torch.float16: "sums_fp16"}

# The best first, since not every compiler has all. Wider vectors read faster from the cache, but slower from memory.
_FLAGS = (("-march=native", "-mprefer-vector-width=256", "-fopenmp"), ("-march=native", "-fopenmp"), ("-fopenmp",), ())
_CHUNK = 2**18  # elements that a thread reads at a time
_WORTH_A_THREAD = 2**22  # elements


def missing(device: torch.device) -> str | None:
    """Why it can't be used on a device here, or None. Compiles nothing."""
    if device.type != "cpu":
        return f"it is for the CPU; on {device.type} the torch backend is one pass over memory as well"
    return None if _compiler() else "no C compiler is on the PATH"


def refuses(dtype: torch.dtype) -> str | None:
    """Why it does not take a dtype, or None."""
    return None if dtype in _FUNCTIONS else f"it is for fp32, bf16 and fp16, not for {dtype}"


def sums_of_squares(lists: list[list[Tensor]]) -> Tensor:
    """What `_torch.sums_of_squares` says, which does it if, with a warning, nothing compiles, or memory can't be seen.

    In each of 32 lanes, 32 squares at a time are added up in fp32 and these sums in fp64; all in fp64 if squares leave
    the range of fp32. The number of threads does not change a bit.
    """
    library = _library()
    dense = [t if t.is_contiguous() or is_dense(t) else t.contiguous() for t in flat(lists)]
    starts, sizes = [start(t) for t in dense], [t.numel() for t in dense]
    if library is None or min(starts) < 0:
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
        ctypes.c_int(_threads(sum(sizes))),
    )
    return sums


def _threads(elements: int) -> int:
    """As many as are worth it; one in a fork of a process that had several, since it would wait for those forever."""
    threads = min(torch.get_num_threads(), max(1, elements // _WORTH_A_THREAD))
    return threads if threads == 1 or _first_with_threads() == os.getpid() else 1


@cache
def _first_with_threads() -> int:
    """The process that first used several. Forks inherit the answer."""
    return os.getpid()


@cache
def _library() -> ctypes.CDLL | None:
    """The translation, or None, with a warning, if there is none."""
    try:
        with TemporaryDirectory(prefix="stepstack-") as folder:
            return ctypes.CDLL(str(_translated(Path(folder))))  # it stays when its file goes
    except (OSError, RuntimeError) as error:
        warnings.warn(
            f"stepstack_gradnorm: squares.c did not compile, so the slower torch backend measures norms: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _translated(folder: Path) -> Path:
    source, target = Path(__file__).with_name("squares.c"), folder / "squares.so"
    for flags in _FLAGS:
        command = [_compiler() or "cc", "-std=gnu11", "-O3", *flags, "-shared", "-fPIC", str(source), "-o", str(target)]
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if ended.returncode == 0:
            return target
    raise RuntimeError(f"{' '.join(command)}\n{ended.stderr}")


@cache
def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "cc", "gcc", "clang"))), None)
