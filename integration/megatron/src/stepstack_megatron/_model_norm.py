"""The norm of the gradient of a whole model, of which other ranks may hold other parts and duplicates."""

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.nn import Parameter

from stepstack_gradnorm import Part, total_norm
from stepstack_megatron._parallel import ParallelState, counts_once, is_expert


def model_norm(
    grads: Sequence[tuple[Parameter, Tensor]], among: Iterable[Tensor] | None, norm_type: float, state: ParallelState
) -> Tensor:
    """The norm of the gradients of all parameters, or of some: 0-d fp32, the same on every rank of the model.

    `grads`: each parameter with its gradient on this rank. `among`: those that count; None: all, of which Megatron's
    duplicates and shared ones count once.
    """
    if among is None:
        counted: set[Tensor] = {param for param, _ in grads if counts_once(param, state.tensor_rank)}
    else:
        counted = _known(list(among), {param for param, _ in grads})
    dense = [grad for param, grad in grads if param in counted and not is_expert(param)]
    experts = [grad for param, grad in grads if param in counted and is_expert(param)]
    parts = [Part(dense, [group for group in [state.model] if group is not None])]
    if state.expert_model is not None:  # on every rank or on none: a rank may have no experts, and takes part
        parts.append(Part(experts, state.expert_model))
    elif experts:
        parts.append(Part(experts))
    return total_norm(parts, norm_type)


def _known(params: list[Tensor], ours: set[Parameter]) -> set[Tensor]:
    for place, param in enumerate(params):
        if param not in ours:
            raise ValueError(
                f"parameter {place} of those given, of shape {tuple(param.shape)}, is not trained by this optimizer"
            )
    return set(params)
