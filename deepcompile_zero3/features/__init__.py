"""Features: each folder plugs into the core, which trains without it."""
