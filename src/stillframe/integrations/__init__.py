"""stillframe inside other loops: their interfaces above, stillframe's public names below; no I/O, no threads."""
