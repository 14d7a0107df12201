"""Logged values: collection, reduction over an epoch, publication."""
