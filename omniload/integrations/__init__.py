"""Frameworks that replace or re-shard a loader they are given, taught to take ours as it is. Each imports its own."""
