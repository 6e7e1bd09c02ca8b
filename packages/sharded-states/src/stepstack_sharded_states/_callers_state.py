"""`state` as callers see it, by what `param_groups` lists or by the model's parameters."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from stepstack_sharded_states._bucket import Member


class CallersState(defaultdict[Any, Any]):
    """States by shard, in which a parameter of the model stands for its shard: `optimizer.state[p]["exp_avg"]`."""

    def __init__(self, member_of: Callable[[Any], Member | None]) -> None:
        super().__init__(dict)
        self._member_of = member_of

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self._shard_of(key))

    def __setitem__(self, key: Any, state: Any) -> None:
        super().__setitem__(self._shard_of(key), state)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(self._shard_of(key))

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(self._shard_of(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._shard_of(key), default)

    def pop(self, key: Any, *default: Any) -> Any:
        return super().pop(self._shard_of(key), *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return super().setdefault(self._shard_of(key), default)

    def copy(self) -> Any:
        return defaultdict(dict, self)

    def __copy__(self) -> Any:
        return self.copy()

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())

    def _shard_of(self, key: Any) -> Any:
        member = self._member_of(key)
        return key if member is None else member.shard
