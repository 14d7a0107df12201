"""Module, data module, and the hooks of both."""
