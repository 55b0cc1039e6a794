"""What a model is made of: components, layers, shapes, what is frozen."""
