"""Optimizer steps in the backward, on local tensors, and over states in files."""
