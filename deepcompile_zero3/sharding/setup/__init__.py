"""What a call of ``fully_shard`` asks for, and how its parameters are built."""
