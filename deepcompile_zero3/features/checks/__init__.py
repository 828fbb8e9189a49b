"""Checks while a model trains: gradients, their norms, and parameters that nobody shards."""
