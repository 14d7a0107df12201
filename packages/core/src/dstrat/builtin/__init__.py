"""Components of the core, offered through the same hook as those of plugins."""
