"""Blocks that are compiled once: equal parts of a graph become calls of one."""
