"""Measurements of omniload and checkpoint beside physical floors and peers: ``python -m benchmarks list``."""
