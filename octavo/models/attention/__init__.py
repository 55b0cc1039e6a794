"""Attention kernels, put into a model through transformers' own registry."""
