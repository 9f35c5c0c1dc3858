"""What a save costs in the loops people already have: ``python -m benchmarks.loops trainer`` (accelerate, lightning).

Each framework is a module here, which trains with its own checkpointing, with ours, and without any.  The model, the
clock and the table are the same for all.  They need what ``make test-loops`` installs.
"""
