"""What a user subclasses: the module that is trained, the data module, and the hooks of both."""
