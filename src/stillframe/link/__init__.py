"""What the trainer and the keeper share: the arena's memory and the messages between them."""
