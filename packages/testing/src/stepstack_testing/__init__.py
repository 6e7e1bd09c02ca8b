"""What the tests of every package share: ranks on one machine, a tripwire for host syncs, counts."""

from stepstack_testing._operations import HostSyncs, Operations
from stepstack_testing._ranks import RankError, on_ranks

__all__ = ["HostSyncs", "Operations", "RankError", "on_ranks"]
