"""Jobs on simulated clusters, for the benchmarks of the runtime."""
