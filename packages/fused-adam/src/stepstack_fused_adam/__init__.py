"""Adam(W) in one pass over memory, in mixed precision."""

from stepstack_fused_adam._functional import adamw_
from stepstack_fused_adam._optimizer import FusedAdamW

__all__ = ["FusedAdamW", "adamw_"]
