"""What the loss of a batch is made of."""
