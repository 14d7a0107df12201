"""The suite for strategies, a part for each capability."""
