"""The command ``dstrat``: what there is, what would run, and whether it would work."""
