"""How ranks agree: the group that talks, and what is agreed on when a run begins."""
