"""Parameters that say what is gathered for them, and tensors that are made of others."""
