"""Adam(W) in one pass over memory, in mixed precision."""

from stepstack_fused_adam._backends import backends
from stepstack_fused_adam._checkpoint import steps_in_groups
from stepstack_fused_adam._functional import adamw_
from stepstack_fused_adam._fused_adam import FusedAdam
from stepstack_fused_adam._optimizer import FusedAdamW

__all__ = ["FusedAdam", "FusedAdamW", "adamw_", "backends", "steps_in_groups"]
