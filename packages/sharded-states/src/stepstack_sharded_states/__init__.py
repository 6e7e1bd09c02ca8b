"""Any elementwise optimizer, its states spread over a mesh of ranks."""

from ._mesh import within_node_mesh
from ._optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer", "within_node_mesh"]
