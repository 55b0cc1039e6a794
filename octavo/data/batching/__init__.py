"""Makes batches of samples: packing, collation, prefetching."""
