"""Model folders that every server loads, in BF16 or FP8: `octavo export`."""

from octavo.checkpoint.export.export import LARGEST, Exported, Progress, check_target, export

__all__ = ["LARGEST", "Exported", "Progress", "check_target", "export"]
