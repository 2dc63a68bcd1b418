"""Benchmarks of what a user runs: variants interleaved, medians with their spread, nothing faster that is wrong."""
