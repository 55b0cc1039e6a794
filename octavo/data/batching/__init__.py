"""Samples become batches: order of packing, mixtures, collation, prefetch."""
