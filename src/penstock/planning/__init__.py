"""What can be told of a model before and beside serving it: memory, speed and quality."""
