"""An optimizer for NeMo configs that shards its states within the node, keeps channels_last and clips right."""
