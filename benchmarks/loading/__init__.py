"""Corpora and contenders of the loader benchmarks."""
