"""Moving over, and moving on: checkpoints ↔ safetensors, torch.save and DCP.

What goes out is verified as it is read and never lies in memory as a whole: files are mapped, and a restore's own
reader fills them.  Nothing appears under its final name before it is complete and durable.
"""
