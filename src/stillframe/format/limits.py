"""The limits of the format.  A writer refuses to exceed them; a reader refuses what does."""

from __future__ import annotations

from stillframe.units import MIB

VERSION = 2
"""What is written; everything from 1 on is read.  Version 2 has tensors whose boxes lie in several segments."""
MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""
MAX_SEAL_BYTES = 128 * MIB
MAX_MANIFEST_BYTES = 64 * MIB
MAX_FAILURE_BYTES = MIB
MAX_CHUNK_BYTES = 1024 * MIB
"""A reader holds a few chunks in memory."""
MAX_DEPTH = 100
"""Levels of nesting in a state."""
MAX_DIMENSIONS = 64
MAX_RANKS = 100_000
