"""A forward: what modules read, and what autograd saves of it, in eager and in traced code."""
