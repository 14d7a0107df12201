"""The strategy that the core brings along."""
