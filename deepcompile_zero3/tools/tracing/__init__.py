"""Traces of a training script's steps."""
