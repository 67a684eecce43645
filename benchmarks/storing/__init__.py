"""What the storage benchmarks move, and the plainest ways to move it."""
