"""What stands around linear layers in a transformer block: norms, MLPs, attention."""
