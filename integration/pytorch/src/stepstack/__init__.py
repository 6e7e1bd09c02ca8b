"""The optimizer step of a PyTorch loop: norm, clip, loss scale and a sharded fused Adam, composed."""

from stepstack._checkpoint import LoadedCheckpoint, async_save_checkpoint, load_checkpoint, save_checkpoint
from stepstack._ranks import CheckpointError
from stepstack._step import OptimizerStep, StepResult

__all__ = [
    "CheckpointError",
    "LoadedCheckpoint",
    "OptimizerStep",
    "StepResult",
    "async_save_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
]
