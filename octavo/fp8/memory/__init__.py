"""What a forward saves for its backward, counted, and ways to save less."""

from octavo.fp8.memory.accounting import ACTIVATION, Row, SavedBytes, count_saved
from octavo.fp8.memory.chunked_head import ChunkedHead, chunk_head
from octavo.fp8.memory.offload import synchronize_per_layer

__all__ = ["ACTIVATION", "ChunkedHead", "Row", "SavedBytes", "chunk_head", "count_saved", "synchronize_per_layer"]
