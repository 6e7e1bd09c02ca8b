"""Any elementwise optimizer, its states spread over a mesh of ranks."""

from stepstack_sharded_states._mesh import within_node_mesh
from stepstack_sharded_states._optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer", "within_node_mesh"]
