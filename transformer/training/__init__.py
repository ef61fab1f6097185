"""Training: optimizers, losses, the train state and the training step."""
