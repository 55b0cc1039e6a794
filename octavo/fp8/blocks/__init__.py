"""What stands around linear layers in a transformer block: norms, MLPs, attention."""

from octavo.fp8.blocks.attention import grouped_attention

__all__ = ["grouped_attention"]
