"""What is asked for, and what a model holds that it can be asked of."""

from octavo.fp8.policy.globs import covers, matches, nearest, template
from octavo.fp8.policy.topology import Row

__all__ = ["Row", "covers", "matches", "nearest", "template"]
