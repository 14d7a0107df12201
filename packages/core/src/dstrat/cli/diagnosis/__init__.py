"""The checks of ``dstrat doctor``; each is a function that yields findings."""
