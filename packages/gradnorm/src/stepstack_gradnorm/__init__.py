"""The norm of a model's gradient, however it is cut over ranks, devices and dtypes."""

from stepstack_gradnorm._backends import backends
from stepstack_gradnorm._grads import grads_of
from stepstack_gradnorm._memory import local_runs
from stepstack_gradnorm._multi_tensor import kernels
from stepstack_gradnorm._norm import tensor_norms, total_norm
from stepstack_gradnorm._part import Grads, Part

__all__ = ["Grads", "Part", "backends", "grads_of", "kernels", "local_runs", "tensor_norms", "total_norm"]
