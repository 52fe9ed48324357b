"""What runs code that was written for others, as it is. Nothing here is imported before a configuration asks for it."""
