"""What every rewritten graph must keep, and the check after each pass."""
