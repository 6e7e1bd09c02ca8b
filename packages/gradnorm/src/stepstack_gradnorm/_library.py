"""A C source of this package as a library: from the wheel, or translated once on this machine and kept in a cache."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

# Without errno and traps, which nobody here asks for, a square root is one instruction. Without contraction to fused
# multiply-adds, which not every CPU has, all CPUs compute the same bits.
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_HERE = (("-DONE_CPU", "-march=native", "-mprefer-vector-width=256"), ("-DONE_CPU", "-march=native"), ())
_LIBRARIES = ("-lpthread", "-lm")


@cache
def load(source: Path) -> ctypes.CDLL | str:
    """The library of a source, or why there is none. Looks for it in the wheel, in the cache, then asks a compiler."""
    prebuilt = source.with_suffix(".so")
    try:
        return ctypes.CDLL(str(prebuilt)) if prebuilt.exists() else _kept(source)
    except (OSError, RuntimeError) as error:
        return str(error)


def missing(source: Path) -> str | None:
    """Why there is certainly no library, or None. Compiles nothing."""
    if source.with_suffix(".so").exists() or compiler() is not None:
        return None
    return "the wheel for this platform has none, and no C compiler (cc, gcc, clang or $CC) is on the PATH"


@cache
def compiler() -> str | None:
    """The path of the machine's C compiler."""
    return next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "cc", "gcc", "clang"))), None)


def translate(source: Path, target: Path, *several: tuple[str, ...]) -> None:
    """Compile a source with the first of several sets of flags that works. RuntimeError with what the last one said."""
    command, said = [compiler() or "cc"], ""
    for flags in several:
        command = [compiler() or "cc", *FLAGS, *flags, str(source), "-o", str(target), *_LIBRARIES]
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if ended.returncode == 0:
            return
        said = ended.stderr
    raise RuntimeError(f"{' '.join(command)}\n{said}")


def _kept(source: Path) -> ctypes.CDLL:
    """The library in the cache, which is translated if it is not there. Many processes may do so at the same time."""
    if compiler() is None:
        raise RuntimeError(missing(source))
    folder, name = _cache(), f"{source.stem}-{_key(source)}.so"
    with suppress(OSError):  # none, or one that is cut off
        return ctypes.CDLL(str(folder / name))
    with ExitStack() as exits:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            beside = exits.enter_context(TemporaryDirectory(prefix=f"{source.stem}-", dir=folder))
        except OSError:  # a read-only home
            beside = exits.enter_context(TemporaryDirectory(prefix="stepstack-"))
        made = Path(beside, name)
        translate(source, made, *_HERE)
        library = ctypes.CDLL(str(made))  # which stays when its file goes
        with suppress(OSError):  # another file system
            os.replace(made, folder / name)  # whole, or not at all; the last one wins
    return library


def _cache() -> Path:
    """The user's cache, where libraries are kept."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return Path(given if os.path.isabs(given) else os.path.expanduser("~/.cache"), "stepstack")


def _key(source: Path) -> str:
    """Changes with whatever the library depends on: the source, the compiler, the CPU."""
    words = [source.read_bytes(), str(compiler()).encode(), repr((FLAGS, _HERE)).encode(), platform.machine().encode()]
    path = Path(str(compiler())).resolve()
    words.append(f"{path} {path.stat().st_mtime_ns}".encode())  # another version, under the same name
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_bytes().split(b"\n\n")[0].splitlines()
        words += [line for line in lines if line.startswith((b"model name", b"flags", b"Features", b"CPU part"))]
    return hashlib.sha256(b"\0".join(words)).hexdigest()[:16]
