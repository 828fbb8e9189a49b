"""Sharding inside of transformers' own loading and trainer."""
