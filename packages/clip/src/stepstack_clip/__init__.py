"""Clipping as one number on the device."""

from stepstack_clip._multiply import multiply_
from stepstack_clip._norm import clip_coefficient, clip_grad_norm_
from stepstack_clip._value import clip_grad_value_

__all__ = ["clip_coefficient", "clip_grad_norm_", "clip_grad_value_", "multiply_"]
