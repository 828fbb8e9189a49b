"""Shards of replicas, divided over these for the optimizer."""
