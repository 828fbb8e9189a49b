"""Benchmarks: compiled and eager, sharded and unsharded, this library and its peers, in turn."""
