"""State, formats and rank processes of the checkpoint benchmarks."""
