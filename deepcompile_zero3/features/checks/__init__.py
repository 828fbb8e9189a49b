"""Checks while a model trains: gradients that are not finite, replicas that differ."""
