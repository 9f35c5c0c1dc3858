"""What is stored, read without torch: which checkpoints there are, what is in one, and whether it is whole."""
