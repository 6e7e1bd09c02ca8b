"""A tensor of which this rank has some boxes, as torch.distributed.checkpoint takes it and fills it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.utils.dlpack import from_dlpack

from stepstack_sharded_states._boxes import Box, memory_order


class Place(Protocol):
    """Where the elements of a piece are, flat, in the order of memory; counted from the start of the piece."""

    @property
    def exists(self) -> bool:
        """Whether there is something to save."""

    def read(self, start: int, stop: int) -> Tensor:
        """Numbers to look at: a view of them where they lie, or decoded for the occasion."""

    def target(self, start: int, stop: int) -> Tensor:
        """What is to be overwritten: where they lie, or a buffer from which they go there later."""


@dataclass
class Copied:
    """A piece as it was, on the CPU."""

    flat: Tensor | None

    @property
    def exists(self) -> bool:
        return self.flat is not None

    def read(self, start: int, stop: int) -> Tensor:
        assert self.flat is not None
        return self.flat[start:stop]

    target = read


@dataclass(eq=False)
class Holding:
    """What a rank has of a tensor of `shape`, which lies in memory in the order of `stride`."""

    shape: Sequence[int]
    stride: Sequence[int]
    boxes: list[Box]
    place: Place
    check: Callable[[], None] | None = None
    """Raises where nothing may be saved now."""
    origin: Any = None
    """Whose it is, for who finds it in a state dict."""
    by_offsets: dict[tuple[int, ...], Box] = field(init=False)

    def __post_init__(self) -> None:
        self.by_offsets = {box.offsets: box for box in self.boxes}

    def part(self, offsets: Sequence[int], *, to_overwrite: bool) -> Tensor:
        """One of the boxes, in the tensor's own dims."""
        box, first = self.by_offsets[tuple(offsets)], self.boxes[0].start
        look = self.place.target if to_overwrite else self.place.read
        order = memory_order(self.shape, self.stride)
        lying = look(box.start - first, box.stop - first).view([box.sizes[dim] for dim in order])
        return lying.permute([order.index(dim) for dim in range(len(order))])

    def to_save(self) -> list[Box]:
        """The boxes that there are now; where they lie they may not be saved, an exception that says why."""
        if self.check is not None:
            self.check()
        return self.boxes if self.place.exists else []

    def copied(self) -> "Holding":
        """On the CPU, as it is now."""
        flat = None
        if self.to_save():
            flat = self.place.read(0, self.boxes[-1].stop - self.boxes[0].start).to("cpu", copy=True)
        return Holding(self.shape, self.stride, self.boxes, Copied(flat))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Holding":
        return self.copied()


class Chunks(Tensor):
    """Boxes of a logical tensor, in torch.distributed.checkpoint's protocol (as DTensor speaks it).

    Save, load, and stage for async_save take it; everything else is refused. What is saved is what the boxes hold when
    they are written; what is loaded goes where `Place.target` says.
    """

    holding: Holding
    loading: bool

    @staticmethod
    def __new__(cls, holding: Holding, dtype: torch.dtype) -> "Chunks":
        chunks = Tensor._make_wrapper_subclass(cls, torch.Size(holding.shape), dtype=dtype, device=torch.device("cpu"))
        assert isinstance(chunks, Chunks)
        chunks.holding, chunks.loading = holding, False
        return chunks

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.new_empty.default:  # how DCP's stager begins a copy; then it copies the attributes
            return Chunks(Holding(args[0].shape, args[0].holding.stride, [], Copied(None)), args[0].dtype)
        raise TypeError(
            f"{func} of a sharded state: it is not here as a whole, and only torch.distributed.checkpoint's save, load "
            "and async_save take it. (FileSystemWriter stages whole tensors: give async_save the checkpoint_id, or "
            "async_stager=DefaultStager(StagingOptions(False, False, False, False)) beside the writer.)"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Chunks({len(self.holding.boxes)} of shape {tuple(self.holding.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Chunks":
        return Chunks(self.holding.copied(), self.dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Chunks, (self.holding.copied(), self.dtype)

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        self.loading = False
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(box),
                    properties=TensorProperties(dtype=self.dtype),
                    size=torch.Size(self.holding.shape),
                ),
            )
            for box in self.holding.to_save()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        self.loading = True
        return [_chunk(box) for box in self.holding.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        part = self.holding.part(index.offset, to_overwrite=self.loading)
        # Without the rest of its storage, or who writes it makes a copy to be rid of that.
        return from_dlpack(part) if part.is_cpu and not self.loading else part


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
