"""``dstrat new``: a package with a component of the author's own."""
