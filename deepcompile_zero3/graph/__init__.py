"""What can be said of any torch.fx graph: its text, its memory, whose memory a node shares."""
