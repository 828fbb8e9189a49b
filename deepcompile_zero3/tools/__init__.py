"""What looks at sharded models and their graphs. The core imports none of it."""
