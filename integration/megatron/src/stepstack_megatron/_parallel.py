"""The parallel groups that Megatron has set up in this process, if it has, and what a parameter says of itself there.

Nothing is imported: where `megatron.core.parallel_state` is not loaded, nobody has initialised it.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ParallelState:
    """Process groups of this rank; None where there is no such parallelism."""

    data: ProcessGroup | None = None
    """Ranks that hold the same parameters and average gradients, those of context parallelism included."""
    expert_data: ProcessGroup | None = None
    """The same for the parameters of experts."""
    model: ProcessGroup | None = None
    """Ranks that hold the other parts of the model: tensor and pipeline parallel ones."""
    expert_model: ProcessGroup | None = None
    """The same as seen from an expert."""
    tensor_rank: int = 0
    """This rank's place in its tensor-parallel group."""


def parallel_state() -> ParallelState:
    """What Megatron has initialised by now."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not dist.is_initialized() or not state.is_initialized():
        return ParallelState()
    return ParallelState(
        data=state.get_data_parallel_group(with_context_parallel=True),
        expert_data=state.get_expert_data_parallel_group(),
        model=state.get_model_parallel_group(),
        expert_model=state.get_expert_tensor_model_pipeline_parallel_group(),
        tensor_rank=state.get_tensor_model_parallel_rank(),
    )


def is_expert(param: Tensor) -> bool:
    """Whether a parameter is an expert's: Megatron says so by `allreduce=False`."""
    return not getattr(param, "allreduce", True)


def counts_once(param: Tensor, tensor_rank: int) -> bool:
    """Whether this rank is the one that counts a parameter of which the model-parallel ranks may hold duplicates.

    Shared embeddings bear `shared` on every stage but one; what is the same on all tensor-parallel ranks counts on the
    first of them.
    """
    return not getattr(param, "shared", False) and (getattr(param, "tensor_model_parallel", False) or tensor_rank == 0)
