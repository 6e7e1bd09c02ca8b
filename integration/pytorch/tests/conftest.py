import sys
from pathlib import Path

import pytest

from stepstack_clip import clip_coefficient
from stepstack_gradnorm import total_norm

sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "examples"))  # the demo is tested here


@pytest.fixture
def step_by_hand():
    """A whole step composed of the packages, clipped to a norm of 1: what `OptimizerStep` is to be, bit for bit."""

    def step(optimizer, scaler, grads):
        norm = total_norm(grads) / scaler.scale_tensor
        optimizer.grad_scale = scaler.scale_tensor / clip_coefficient(norm, max_norm=1.0)
        optimizer.found_inf = found_inf = (~norm.isfinite()).float()
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
        scaler.update(found_inf=found_inf)
        optimizer.zero_grad()
        return norm, found_inf

    return step
