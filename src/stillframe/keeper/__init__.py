"""The keeper: a small process without torch that turns staged chunks into committed checkpoints.

It outlives its trainer.  Its promise: a save whose every chunk has reached the arena is
committed, or reported failed, whatever happens to the trainer; a save that was not completely
staged leaves nothing behind.
"""
