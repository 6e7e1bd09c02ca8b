"""An optimizer for NeMo configs that shards its states within the node, keeps channels_last and clips right."""

from stepstack_nemo._optimizer import DistributedFusedAdam

__all__ = ["DistributedFusedAdam"]
