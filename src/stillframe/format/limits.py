"""The limits of the format.  A writer refuses to exceed them; a reader refuses what does."""

from __future__ import annotations

from stillframe.units import MIB

VERSION = 1
"""What is written and read."""
MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""
MAX_SEAL_BYTES = 128 * MIB
MAX_MANIFEST_BYTES = 64 * MIB
MAX_CHUNK_BYTES = 1024 * MIB
"""A reader holds a few chunks in memory."""
MAX_DEPTH = 100
"""Levels of nesting in a state."""
MAX_DIMENSIONS = 64
MAX_DIVIDED = 12
"""Dimensions in which one tensor is divided into boxes.  Whether boxes tile it is told by all their corners."""
MAX_RANKS = 100_000
MAX_PIECES = 4_000_000
"""Of a layout: ranks of the mesh times split factors."""
MAX_LINEAGE_ROWS = 10_000
MAX_TIERS = 8
MAX_NOTE_BYTES = 4 * MIB
"""Of the small files: claims, parents, outcomes, tombstones."""
