"""What a piece of code dispatches: a count of all of it, and a tripwire for what would wait for the device."""

import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operators whose result the host needs: their value, or a size that depends on values.
_WAITING = {
    f"aten.{name}"
    for name in (
        "_local_scalar_dense",
        "bincount",
        "equal",
        "is_nonzero",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
        "_unique2",
    )
}
# Methods that hand values to the host without dispatching anything when the tensor is on the CPU already.
_ESCAPING = ("__array__", "cpu", "numpy", "tolist")


class _Recording(TorchDispatchMode):
    def __init__(self, record: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let it say what it is made of
        if not any(issubclass(kind, FakeTensor) for kind in types):  # DTensor infers shapes with those
            self._record(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


class Operations(Counter[str]):
    """Counts dispatched operations by name; collectives are among them, as `c10d.…`.

        with Operations() as operations:
            ...
        assert operations.total() == 12 and operations["c10d.allreduce_"] == 1

    Under a DTensor the local operations are counted, not the DTensor's own. Views count too.
    """

    def __enter__(self) -> "Operations":
        self._exits = ExitStack()
        self._exits.enter_context(_Recording(lambda name: self.update((name,))))
        return self

    def __exit__(self, *error: Any) -> None:
        self._exits.close()

    def collectives(self) -> dict[str, int]:
        """The c10d operations among them."""
        return {name: count for name, count in self.items() if name.startswith("c10d.")}


class HostSyncs(list[str]):
    """Lists what waits for the device: reads of a value, sizes that depend on values, copies to the host.

        with HostSyncs() as syncs:
            ...
        assert syncs == []

    On a CPU tensor too, where nothing would wait: code that is clean here does not wait on a GPU. `tolist`, `numpy`
    and `cpu()` are caught as method calls, since they dispatch nothing there. `syncs.where` has the stack of each.
    """

    def __enter__(self) -> "HostSyncs":
        self.where: list[str] = []
        self._exits = ExitStack()
        for name in _ESCAPING:
            method = getattr(torch.Tensor, name)
            self._exits.enter_context(mock.patch.object(torch.Tensor, name, self._noting(name, method)))
        self._exits.enter_context(_Recording(lambda name: self._note(name) if name in _WAITING else None))
        return self

    def __exit__(self, *error: Any) -> None:
        self._exits.close()

    def _noting(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._note(f"Tensor.{name}")
            return method(*args, **kwargs)

        return noted

    def _note(self, name: str) -> None:
        self.append(name)
        self.where.append("".join(traceback.format_stack(limit=12)[:-2]))
