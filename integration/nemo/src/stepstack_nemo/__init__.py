"""An optimizer for NeMo configs that shards its states within the node, keeps channels_last and clips right."""

from importlib.util import find_spec

from stepstack_nemo._clipping import configure_gradient_clipping
from stepstack_nemo._optimizer import DistributedFusedAdam
from stepstack_nemo._registry import register, take_over
from stepstack_nemo._scaler import GradScaler

__all__ = ["DistributedFusedAdam", "GradScaler", "configure_gradient_clipping", "register", "take_over"]

if find_spec("nemo") is not None:  # a config names the optimizer, so importing this is all that a script does for it
    register()
