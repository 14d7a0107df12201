"""How checkpoints reach storage."""
