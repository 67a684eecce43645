"""The main job end to end on real data: load, train, break, resume elsewhere, prove, export, report."""
