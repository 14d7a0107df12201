"""A strategy in a training loop that the user has written; nothing here knows the Trainer."""
