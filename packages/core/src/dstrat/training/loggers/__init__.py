"""Where logged values are written."""
