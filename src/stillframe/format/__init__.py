"""Bytes ↔ structures: what is in the files of a checkpoint (specified in docs/FORMAT.md).

Knows nothing of where the bytes lie, of torch, or of processes.  Everything has a version
and limits, checked when written and again when read.
"""
