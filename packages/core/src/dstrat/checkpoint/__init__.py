"""Checkpoint ios: portable folders and torch files."""
