"""The hardware that torch itself brings along."""
