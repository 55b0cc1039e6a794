"""Attention kernels, selected through transformers' registry."""
