"""Checks while a model trains: gradients that are not finite, and norms of each gradient."""
