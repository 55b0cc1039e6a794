"""What a forward saves for its backward, counted, and ways to save less."""

from octavo.fp8.memory.accounting import ACTIVATION, Row, SavedBytes, count_saved

__all__ = ["ACTIVATION", "Row", "SavedBytes", "count_saved"]
