"""Plans of training steps on machines that need not exist."""
