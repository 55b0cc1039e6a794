"""A stock model to be saved as transformers would, and the checksums of an export."""
