"""From a checkpoint back to live objects: match, read and verify, place, apply."""
