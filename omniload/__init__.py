"""Samples from many sources become balanced, packed, per-rank microbatches."""
