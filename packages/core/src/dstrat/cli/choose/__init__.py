"""``dstrat choose``: the fastest layout that fits, by a model of the time of a step."""
