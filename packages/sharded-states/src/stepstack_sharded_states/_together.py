"""Doing things on several ranks such that they succeed everywhere, or fail everywhere with the same words."""

from collections.abc import Callable, Collection
from typing import TypeVar, cast

import torch

from stepstack_sharded_states._mesh import Ranks, this_rank

Result = TypeVar("Result")


def agree(meshes: Collection[Ranks], device: torch.device, function: Callable[[], Result]) -> Result:
    """What the function returns. Every rank of the meshes calls this, and waits for the others.

    If it raises on one, all raise: TypeError where that was one, else ValueError, with the words of a rank that failed.
    An interrupt stays what it is on the rank that it has reached.
    """
    result: Result | None = None
    here: BaseException | None = None
    failed = torch.zeros((), device=device)
    try:
        result = function()
    except BaseException as error:  # whatever it is, the others must not be left waiting for this rank
        here = error
        failed.fill_(1)
    for ranks in meshes:
        ranks.all_reduce_max(failed)
    if not failed:  # waits, a few times in a load
        return cast(Result, result)
    said = None if here is None else (isinstance(here, TypeError), _words(here))
    for ranks in meshes:
        said = next((told for told in ranks.gather_objects(said) if told), None)
    if here is not None and not isinstance(here, Exception):
        raise here
    assert said is not None
    is_type_error, words = said
    raise (TypeError if is_type_error else ValueError)(words) from here


def _words(error: BaseException) -> str:
    words = str(error)
    if not isinstance(error, ValueError | TypeError | RuntimeError):
        words = f"{type(error).__name__}: {words}"
    return words if words.startswith(("rank ", "this process")) else f"{this_rank()}: {words}"
