"""The norm of a model's gradient, however it is cut over ranks, devices and dtypes."""
