"""What makes new weights of a loss: one optimizer step, and how it is executed."""
