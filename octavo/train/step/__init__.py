"""One optimizer step, from the loss to new weights, and how it is executed."""
