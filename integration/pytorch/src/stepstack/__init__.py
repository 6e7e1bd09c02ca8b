"""The optimizer step of a PyTorch loop: norm, clip, loss scale and a sharded fused Adam, composed."""
