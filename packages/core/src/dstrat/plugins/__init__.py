"""Finding and naming components.  Never imports torch."""
