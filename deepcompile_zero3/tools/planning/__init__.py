"""Plans of steps on machines that need not be there."""
