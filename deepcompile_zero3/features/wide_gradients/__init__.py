"""Weights' gradients that a graph computes in the dtype in which they are reduced."""
