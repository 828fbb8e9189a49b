"""Tools for any torch.fx graph: its text, its memory, and which nodes share memory."""
