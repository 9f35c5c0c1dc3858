"""What a save costs in the loops people already have: ``python -m benchmarks.loops trainer`` (accelerate, lightning).

Each framework is a module here, which trains with its own checkpointing, with ours, and without any.  The model, the
clock and the table are the same for all.  With ``torchrun --standalone --nproc-per-node 2 -m`` in the place of
``python -m``, FSDP2 divides the model between the ranks.  They need what ``make test-loops`` installs, and engines
what ``make test-engines`` installs.
"""
