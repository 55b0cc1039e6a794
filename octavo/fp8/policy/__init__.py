"""What is asked for, and what a model holds that it can be asked of."""

from octavo.fp8.policy.globs import covers, matches, nearest, template
from octavo.fp8.policy.topology import topology

__all__ = ["covers", "matches", "nearest", "template", "topology"]
