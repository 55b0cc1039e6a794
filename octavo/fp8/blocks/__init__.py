"""Norms, MLPs and attention: the modules around linear layers in a transformer block."""

from octavo.fp8.blocks.attention import grouped_attention

__all__ = ["grouped_attention"]
