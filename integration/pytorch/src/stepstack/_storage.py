"""torch.distributed.checkpoint's files, written for good and with checksums, read without running what they say."""

import io
import os
import pickle
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_unsafe_globals_in_checkpoint

from stepstack._folder import METADATA, Marker, Record, naming, read
from stepstack._ranks import CheckpointError, Ranks, words_of
from stepstack_sharded_states import ShardedLoadPlanner

# What the metadata consists of. None of these does anything but hold what it is given.
_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    (f"{_DCP}.metadata", "BytesStorageMetadata"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}


class Entry(NamedTuple):
    """What a checkpoint says of a tensor that it has."""

    shape: torch.Size
    dtype: torch.dtype


class Wanted(NamedTuple):
    """What to read: by name, into what; what each name is called in the checkpoint; and values, which are known."""

    into: dict[str, Any]
    sources: dict[str, str]
    values: dict[str, Any]


def write_tensors(
    folder: Path, tensors: dict[str, dict[str, Tensor]], ranks: Ranks, copied: Callable[[], None] | None = None
) -> dict[str, Record]:
    """Write what ranks have of tensors, each its share; the files that this one has written.

    With `copied`, what this rank is to write is copied to the CPU first, and `copied` is called: from then on the
    tensors may change.
    """
    writer = _Writer(folder)
    planner = _Planner() if copied is None else _CopyingPlanner(copied)
    with _in_our_words(ranks):
        save(tensors, storage_writer=writer, planner=planner, process_group=ranks.group, no_dist=ranks.alone)
    return writer.files.written


def read_metadata(checkpoint: Path, marker: Marker) -> Metadata:
    """Which tensors there are, and where. ValueError where that is not what was written, or anything but that."""
    path = checkpoint / METADATA
    try:
        metadata = _Unpickler(io.BytesIO(read(path, marker.files[METADATA]))).load()
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} is not the metadata of a checkpoint: {error}") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{path} is not the metadata of a checkpoint, but a {type(metadata).__name__}")
    for info in metadata.storage_data.values():
        if info.relative_path not in marker.files:
            raise ValueError(f"{path} leads to {info.relative_path!r}, which is not a part of the checkpoint")
    for name, entry in metadata.state_dict_metadata.items():
        for chunk in entry.chunks if isinstance(entry, TensorStorageMetadata) else ():
            if MetadataIndex(name, chunk.offsets) not in metadata.storage_data:
                raise ValueError(f"{path} doesn't say where the part of {name!r} at {tuple(chunk.offsets)} is")
    return metadata


def entries_of(metadata: Metadata) -> dict[str, Entry]:
    """The tensors that a checkpoint has."""
    return {
        name: Entry(entry.size, entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def check_readable(checkpoint: Path, metadata: Metadata) -> None:
    """ValueError, by name, for a tensor that was written as something that can't be read without running it."""
    for index, info in metadata.storage_data.items():
        with (checkpoint / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            unsafe = get_unsafe_globals_in_checkpoint(io.BytesIO(file.read(info.length)))
        if unsafe:
            raise ValueError(
                f"{checkpoint}: {index.fqn!r} was saved as a {', '.join(unsafe)}, and nothing but plain tensors is read"
            )


def read_tensors(checkpoint: Path, metadata: Metadata, wanted: Wanted, ranks: Ranks) -> None:
    """Fill `wanted.into`, whose tensors have the shapes of those in the checkpoint."""
    entries: dict[str, Any] = {name: metadata.state_dict_metadata[source] for name, source in wanted.sources.items()}
    places = {
        MetadataIndex(name, chunk.offsets): metadata.storage_data[MetadataIndex(wanted.sources[name], chunk.offsets)]
        for name, entry in entries.items()
        for chunk in entry.chunks
    }
    entries |= dict.fromkeys(wanted.values, BytesStorageMetadata())
    reader = _Reader(checkpoint, Metadata(entries, storage_data=places, storage_meta=StorageMeta()), wanted.values)
    planner = ShardedLoadPlanner(flatten_state_dict=False)
    with _in_our_words(ranks):
        load(wanted.into, storage_reader=reader, planner=planner, process_group=ranks.group, no_dist=ranks.alone)


class _Writer(FileSystemWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False)  # that would come before the last bytes; `_Files` does it
        self.fs = self.files = _Files()

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # without the folder, whose name does not stay

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As FileSystemWriter does it in one thread, but for one thing: no tensor is held when it has been written."""
        results = []
        if plan.items:
            name = f"{plan.storage_data.prefix}0.distcp"
            with self.files.create_stream(Path(self.path) / name, "wb") as stream:
                for item in plan.items:
                    offset = stream.tell()
                    torch.save(_alone(planner.resolve_data(item)), cast(IO[bytes], stream))
                    length = stream.tell() - offset
                    results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


class _Files(FileSystem):
    """Files that are on the disk once they are closed, and are known by their checksums."""

    def __init__(self) -> None:
        self.written: dict[str, Record] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        summed = _Summed(path, mode)
        try:
            with io.BufferedWriter(summed) as stream:
                yield stream
        except RuntimeError as error:
            raise summed.error or error from None
        self.written[Path(path).name] = Record(summed.size, summed.crc32)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class _Summed(io.FileIO):
    """A file that sums up what goes through it, and is on the disk when it is closed."""

    size = crc32 = 0
    error: OSError | None = None
    """That a write has failed, which torch's own writer says in words that nobody understands."""

    def write(self, data: Any) -> int:
        try:
            with naming(self.name):
                count = super().write(data)
        except OSError as error:
            self.error = error
            raise
        self.size, self.crc32 = self.size + count, zlib.crc32(memoryview(data).cast("B")[:count], self.crc32)
        return count

    def close(self) -> None:
        if not self.closed:
            try:
                with naming(self.name):
                    os.fsync(self.fileno())
            finally:
                super().close()


class _Planner(DefaultSavePlanner):
    """Refuses two things of one name: of what several ranks have, one writes it, and the others' would be lost."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On one rank, whose exceptions are everybody's."""
        first: dict[str, tuple[int, Entry]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                assert item.tensor_data is not None
                entry = Entry(item.tensor_data.size, item.tensor_data.properties.dtype)
                other, there = first.setdefault(item.index.fqn, (rank, entry))
                if entry != there:
                    raise ValueError(
                        f"{item.index.fqn!r} is {tuple(there.shape)}, {there.dtype} on rank {other} and "
                        f"{tuple(entry.shape)}, {entry.dtype} on rank {rank}: what differs needs different names"
                    )
        return super().create_global_plan(all_plans)


class _CopyingPlanner(_Planner):
    """Copies what this rank is to write as soon as that has been agreed on."""

    def __init__(self, copied: Callable[[], None]) -> None:
        super().__init__()
        self._copied = copied
        self._copies: dict[MetadataIndex, Tensor] = {}

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        for item in plan.items:
            tensor = super().resolve_data(item)
            assert isinstance(tensor, Tensor)
            self._copies[item.index] = torch.empty_like(tensor, device="cpu").copy_(tensor)
        self.state_dict = {}
        self._copied()
        return plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._copies.pop(write_item.index)


class _Reader(FileSystemReader):
    """Reads by metadata that have been checked, and values that have been read, already."""

    def __init__(self, checkpoint: Path, metadata: Metadata, values: dict[str, Any]) -> None:
        super().__init__(checkpoint)
        self._metadata, self._values = metadata, values

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                as_bytes = io.BytesIO()
                torch.save(self._values[item.storage_index.fqn], as_bytes)
                as_bytes.seek(0)
                planner.load_bytes(item, as_bytes)
        tensors = [item for item in plan.items if item.type is LoadItemType.TENSOR]
        try:
            return super().read_data(replace(plan, items=tensors), planner)
        except pickle.UnpicklingError:
            check_readable(Path(self.path), self._metadata)  # says which
            raise


def _alone(tensor: Any) -> Tensor:
    """The tensor on the CPU, in a storage that has nothing else, so that nothing else is written. Copies if need be."""
    here: Tensor = tensor.detach().cpu()
    if here.untyped_storage().nbytes() == here.nbytes:
        return here
    order = sorted(range(here.ndim), key=here.stride, reverse=True)
    lying = here.permute(order)
    if not (here.numel() and lying.is_contiguous()):
        return here.clone()
    as_bytes = torch.from_numpy(lying.reshape(-1).view(torch.uint8).numpy())  # the same memory
    return as_bytes.view(here.dtype).view(lying.shape).permute([order.index(dim) for dim in range(here.ndim)])


class _Unpickler(pickle.Unpickler):
    """Makes what is allowed; at anything else it stops, before that is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it wants {module}.{name}, which is not allowed there")
        return super().find_class(module, name)


@contextmanager
def _in_our_words(ranks: Ranks) -> Iterator[None]:
    with warnings.catch_warnings():
        if ranks.alone:  # which is nothing to be warned of
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as error:
            here = error.failures.get(ranks.rank, (None,))[0]
            if here is not None and not isinstance(here, Exception):
                raise here from None  # an interrupt: the others have been told
            failed = {rank: str(words_of(raised)) for rank, (raised, _) in error.failures.items()}
            raise CheckpointError(ranks.said(failed)) from error
