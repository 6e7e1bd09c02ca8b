"""Dynamic loss scaling that never waits for the device."""

from stepstack_grad_scaler._scaler import GradScaler
from stepstack_grad_scaler._schedule import AppliedStepsLR

__all__ = ["AppliedStepsLR", "GradScaler"]
