"""`octavo export`: writes model folders in BF16 or FP8 that every server loads."""

from octavo.checkpoint.export.export import LARGEST, Exported, Progress, check_target, export

__all__ = ["LARGEST", "Exported", "Progress", "check_target", "export"]
