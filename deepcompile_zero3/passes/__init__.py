"""Pure functions on torch.fx graphs: a graph and frozen facts in, a rewritten graph out."""
