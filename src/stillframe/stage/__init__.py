"""From live objects to chunks in the arena: walk, plan, capture, stage, fence.  Knows torch; knows no files."""
