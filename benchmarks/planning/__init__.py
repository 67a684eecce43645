"""Lengths, metadata without data, and settings for the benchmarks of the planner."""
