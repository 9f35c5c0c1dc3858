"""Out of the live tensors: plan, capture, stage, fence, and the keeper's client.  Knows torch; knows no files."""
