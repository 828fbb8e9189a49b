"""Invariants of rewritten graphs, and their check after each pass."""
