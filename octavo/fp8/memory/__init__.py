"""What a forward saves for its backward, counted, and ways to save less."""

from octavo.fp8.memory.accounting import ACTIVATION, Kept, Row, kept

__all__ = ["ACTIVATION", "Kept", "Row", "kept"]
