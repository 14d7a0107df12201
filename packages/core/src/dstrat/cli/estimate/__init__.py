"""``dstrat estimate``: memory of a training per rank, for each strategy."""
