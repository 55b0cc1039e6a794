"""What is asked for, and what a model holds that it can be asked of."""

from octavo.fp8.policy.globs import covers, matches, nearest, template

__all__ = ["covers", "matches", "nearest", "template"]
