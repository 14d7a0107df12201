"""Strategies in a hand-written training loop; nothing here imports the Trainer."""
