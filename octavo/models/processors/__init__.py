"""Processors of images, videos, sounds and text, and generation with a model's own settings."""
