"""What a forward keeps for its backward, counted, and ways to keep less."""

from octavo.fp8.memory.accounting import ACTIVATION, Kept, Row, kept

__all__ = ["ACTIVATION", "Kept", "Row", "kept"]
