"""Memory of another kind: shards, optimizer states and activations in files or on the host."""
