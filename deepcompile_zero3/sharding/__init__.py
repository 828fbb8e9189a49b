"""Sharded modules, their groups and parameters, and what becomes of gradients."""
