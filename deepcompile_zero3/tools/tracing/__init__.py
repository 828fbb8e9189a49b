"""What a step of a training script really does."""
