"""Dynamic loss scaling that never waits for the device."""

from stepstack_grad_scaler._scaler import GradScaler

__all__ = ["GradScaler"]
