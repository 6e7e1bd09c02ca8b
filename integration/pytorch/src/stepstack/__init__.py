"""The optimizer step of a PyTorch loop: norm, clip, loss scale and a sharded fused Adam, composed."""

from stepstack._step import OptimizerStep, StepResult

__all__ = ["OptimizerStep", "StepResult"]
