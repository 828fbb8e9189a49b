"""What becomes of reduced gradients: delivery, norms, and steps that follow."""
