"""What a training loop iterates over, put together as a configuration says."""
