"""Norm, clip, loss scale and Adam for DeepSpeed engines and DeepSpeed configs."""
