"""How a model is sharded."""
