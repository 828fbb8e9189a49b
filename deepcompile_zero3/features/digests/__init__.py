"""Digests of shards, gradients and states of optimizers, which tell runs of equal bits apart."""
