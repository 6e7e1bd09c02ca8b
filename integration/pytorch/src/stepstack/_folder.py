"""A folder of checkpoints, each complete or absent, whenever a process that writes one is killed.

runs/gpt/
    step_200/            complete, since a folder gets such a name only when it is
        .metadata            which tensors there are and where, as torch.distributed.checkpoint writes it
        __0_0.distcp …       the tensors, a file for each rank that wrote some
        values.json          all that is not a tensor
        checkpoint.json      the marker: format, step, and sizes and checksums of the other files
    step_300.….partial/  being written, being removed, or left by a process that was killed meanwhile; the name is new
    step_200.replaced/   the old one, in the moment in which a checkpoint of the same step takes its place
    .saving              while somebody saves: the lock
"""

import json
import os
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

MARKER, VALUES, METADATA = "checkpoint.json", "values.json", ".metadata"
FORMAT, VERSION = "stepstack checkpoint", 1
_CHECKSUM = ',\n "crc32": "'  # of all that is before it
_CHUNK = 1 << 22


class Record(NamedTuple):
    """What a marker says of a file. crc32 costs half of what sha256 does, and misses no damage of up to four bytes."""

    size: int
    crc32: int


class Marker(NamedTuple):
    """What a complete checkpoint says of itself. `files` has all of it but the marker."""

    step: int
    ranks: int
    torch: str
    written: str
    files: dict[str, Record]


def steps_in(folder: Path) -> dict[int, Path]:
    """The complete checkpoints of a folder by step, in order."""
    found: dict[int, Path] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        name = re.fullmatch(r"step_(0|[1-9]\d*)(\.replaced)?", path.name)
        if name and path.is_dir() and not (name[2] and int(name[1]) in found):
            found[int(name[1])] = path
            replaced = path.with_name(f"step_{name[1]}")
            if name[2] and replaced.is_dir():
                found[int(name[1])] = replaced
    return dict(sorted(found.items()))


def find(folder: Path, step: int | None) -> Path:
    """The checkpoint of a step, or the newest; `folder` may also be one itself. ValueError where there is none."""
    if (folder / MARKER).is_file():
        if step is not None:
            raise ValueError(
                f"{folder} is itself a checkpoint: for one of several steps, give the folder that they are in"
            )
        return folder
    steps = steps_in(folder)
    if not steps:
        reason = "it has no step_… in it" if folder.is_dir() else f"{folder.absolute()} is no folder"
        raise ValueError(f"{folder}: there is no checkpoint, {reason}")
    if step is not None and step not in steps:
        raise ValueError(f"{folder}: there is no checkpoint of step {step}, only of {', '.join(map(str, steps))}")
    return steps[max(steps) if step is None else step]


def prepare(folder: Path) -> None:
    """Make a folder of checkpoints, if there is none. ValueError where there can be none."""
    if inside := checkpoint_around(folder / "step_0"):
        raise ValueError(f"{inside} is itself a checkpoint: give the folder that it is in, {inside.parent}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"{folder} can't be a folder of checkpoints: {error.filename} is no folder") from error


def checkpoint_around(path: Path) -> Path | None:
    """The checkpoint that a path leads into, if any."""
    folders = [*path.absolute().parents, *path.resolve().parents]
    return next((folder for folder in folders if (folder / MARKER).exists()), None)


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write a checkpoint into, beside the complete ones. Clears away what killed processes left."""
    complete = folder / f"step_{step}"
    if os.path.lexists(complete) and not (complete / MARKER).is_file():
        raise ValueError(
            f"{complete} is in the way: it has no {MARKER}, so it is no checkpoint, and is not deleted. Move it "
            "away, or save another step"
        )
    for path in folder.glob("step_*.replaced"):
        if path.with_suffix("").exists():
            remove(path)
        else:
            path.rename(path.with_suffix(""))
    for path in folder.glob("step_*.partial"):
        if _is_left(path):
            with suppress(FileNotFoundError):  # where there are no locks, its owner may just have renamed it
                remove(path)
    aside = _aside(folder, step)
    aside.mkdir()
    return aside


def give_up(aside: Path) -> None:
    """Remove what has been written of a checkpoint that will not be one, as far as possible."""
    shutil.rmtree(aside, ignore_errors=True)


def finish(aside: Path, *, step: int, ranks: int, files: dict[str, Record]) -> Path:
    """Give a checkpoint that has all its files its marker and its name. It takes the place of one of the same step."""
    write(aside / MARKER, _marker_text(step, ranks, files))
    sync(aside)
    complete = aside.with_name(f"step_{step}")
    replaced = aside.with_name(f"step_{step}.replaced")
    if complete.exists():
        complete.rename(replaced)
    aside.rename(complete)
    sync(complete.parent)
    if replaced.exists():
        remove(replaced)
    return complete


def keep_newest(folder: Path, count: int, *, step: int) -> None:
    """Remove the checkpoints of the lowest steps until `count` are left, but not the one of `step`."""
    others = [path for number, path in steps_in(folder).items() if number != step and (path / MARKER).is_file()]
    for path in others[: max(0, len(others) + 1 - count)]:
        remove(path)


def remove(path: Path) -> None:
    """Remove a checkpoint, or what is left of one, which can become none from the first moment on."""
    number = re.match(r"step_(\d+)", path.name)
    aside = _aside(path.parent, int(number[1]) if number else 0)
    path.rename(aside)
    _delete(aside)


def write(path: Path, data: bytes) -> Record:
    """Write a small file for good."""
    with naming(path), path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Record(len(data), zlib.crc32(data))


@contextmanager
def naming(path: str | os.PathLike[str] | int) -> Iterator[None]:
    """Errors of the system in here, such as a full disk, say which file it was."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise type(error)(error.errno, error.strerror, str(path)) from error
        raise


def sync(folder: Path) -> None:
    """Make the names in a folder last."""
    if os.name == "nt":  # where a folder can't be opened, and need not be
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_marker(checkpoint: Path) -> Marker:
    """ValueError where it is missing, damaged, or of a later format."""
    path = checkpoint / MARKER
    if not path.is_file():
        raise ValueError(f"{checkpoint} has no {MARKER}: it was not written as a checkpoint, or is damaged")
    data = path.read_bytes()
    said, _, tail = data.rpartition(_CHECKSUM.encode())
    if tail != _tail(said):
        raise ValueError(f"{path} is damaged: its checksum is wrong")
    marker = json.loads(data)
    if marker.get("format") != FORMAT or marker.get("version") != VERSION:
        raise ValueError(
            f"{path} is of format {marker.get('format')!r}, version {marker.get('version')}; this stepstack reads "
            f"{FORMAT!r}, version {VERSION}"
        )
    files = {name: Record(file["bytes"], int(file["crc32"], 16)) for name, file in marker["files"].items()}
    return Marker(marker["step"], marker["ranks"], marker["torch"], marker["written"], files)


def check_names(checkpoint: Path, marker: Marker) -> None:
    """ValueError where there is a file too many or a file too few."""
    there = {path.name for path in checkpoint.iterdir()} - {MARKER}
    if missing := sorted(marker.files.keys() - there):
        raise ValueError(f"{checkpoint / missing[0]} is missing")
    if foreign := sorted(there - marker.files.keys()):
        raise ValueError(f"{checkpoint / foreign[0]} is not a part of the checkpoint")


def verify(checkpoint: Path) -> Marker:
    """Look at every byte. ValueError where something is not what was written."""
    marker = read_marker(checkpoint)
    check_names(checkpoint, marker)
    for name, record in marker.files.items():
        check(checkpoint / name, record)
    return marker


def check(path: Path, record: Record) -> None:
    """ValueError where a file is not what was written."""
    size, crc32 = 0, 0
    chunk = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            size, crc32 = size + count, zlib.crc32(chunk[:count], crc32)
    _compare(path, Record(size, crc32), record)


def read(path: Path, record: Record) -> bytes:
    """A small file, if it is what was written; else ValueError."""
    data = path.read_bytes()
    _compare(path, Record(len(data), zlib.crc32(data)), record)
    return data


def _aside(folder: Path, step: int) -> Path:
    """A name that nobody else has: ranks of a process that has died may still write under its own."""
    return folder / f"step_{step}.{secrets.token_hex(4)}.partial"


def _is_left(path: Path) -> bool:
    """It has the name of something of ours, and is a folder, or a link to one that was removed."""
    ours = re.fullmatch(r"step_\d+(\.[0-9a-f]{8})?\.partial", path.name)
    return bool(ours) and (path.is_dir() or path.is_symlink())


def _delete(path: Path) -> None:
    """Delete a folder, or what else has its name: of a link to a checkpoint that somebody moved away, only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _compare(path: Path, there: Record, written: Record) -> None:
    if there.size != written.size:
        raise ValueError(f"{path} is damaged: it has {there.size:,} bytes, and {written.size:,} were written")
    if there.crc32 != written.crc32:
        raise ValueError(f"{path} is damaged: its contents are not what was written")


def _marker_text(step: int, ranks: int, files: dict[str, Record]) -> bytes:
    marker: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "ranks": ranks,
        "torch": torch.__version__,
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "files": {
            name: {"bytes": record.size, "crc32": f"{record.crc32:08x}"} for name, record in sorted(files.items())
        },
    }
    said = json.dumps(marker, indent=1).removesuffix("\n}").encode()
    return said + _CHECKSUM.encode() + _tail(said)


def _tail(said: bytes) -> bytes:
    return f'{zlib.crc32(said):08x}"\n}}\n'.encode()
