"""FP8 policies, and the layers of a model that they apply to."""

from octavo.fp8.policy.globs import covers, matches, nearest, template
from octavo.fp8.policy.topology import Row

__all__ = ["Row", "covers", "matches", "nearest", "template"]
