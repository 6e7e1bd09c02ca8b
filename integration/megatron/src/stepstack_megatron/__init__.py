"""Norm, clip, loss scale and Adam for Megatron-core optimizers."""
