"""The norm of a model's gradient, however it is cut over ranks, devices and dtypes."""

from stepstack_gradnorm._grads import grads_of
from stepstack_gradnorm._norm import tensor_norms, total_norm
from stepstack_gradnorm._part import Grads, Part
from stepstack_gradnorm._runs import local_runs

__all__ = ["Grads", "Part", "grads_of", "local_runs", "tensor_norms", "total_norm"]
