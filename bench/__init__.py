"""Compiled against eager, sharded against not, ours against its peers: steps taken in turn."""
