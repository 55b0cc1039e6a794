"""`octavo export`: writes model folders in BF16 or FP8 that every server loads."""

from octavo.checkpoint.export.export import MAX_FILE_BYTES, ExportResult, Progress, check_target, export

__all__ = ["MAX_FILE_BYTES", "ExportResult", "Progress", "check_target", "export"]
