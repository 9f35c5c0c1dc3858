"""Names ↔ bytes on a file system: durable, atomic, and direct.  Knows nothing of what the bytes mean."""
