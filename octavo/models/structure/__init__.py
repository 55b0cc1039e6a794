"""The structure of a model: components, layers, shapes, frozen parameters."""
