"""The core's own components, offered through the same hook as everyone's."""
