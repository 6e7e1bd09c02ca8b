"""An optimizer for NeMo configs that shards its states within the node, keeps channels_last and clips right."""

from stepstack_nemo._clipping import configure_gradient_clipping
from stepstack_nemo._optimizer import DistributedFusedAdam
from stepstack_nemo._scaler import GradScaler

__all__ = ["DistributedFusedAdam", "GradScaler", "configure_gradient_clipping"]
