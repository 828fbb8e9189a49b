"""Sharded modules, parameters and gradients, and their life in eager code."""
