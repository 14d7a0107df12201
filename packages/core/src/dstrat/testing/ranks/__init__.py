"""Ranks of the conformance kit, and what they run."""
