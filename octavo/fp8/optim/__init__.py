"""AdamW with 8-bit states: the moments in one byte each, the weights with or without an fp32 master."""
