"""Any elementwise optimizer, its states spread over a mesh of ranks."""

from stepstack_sharded_states._mesh import within_node_mesh
from stepstack_sharded_states._optimizer import ShardedOptimizer
from stepstack_sharded_states._planner import ShardedLoadPlanner

__all__ = ["ShardedLoadPlanner", "ShardedOptimizer", "within_node_mesh"]
