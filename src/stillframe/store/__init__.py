"""Names ↔ immutable bytes: the narrow waist.  The only room that touches a file."""
