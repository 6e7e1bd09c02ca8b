"""Adam(W) in one pass over memory, in mixed precision."""
