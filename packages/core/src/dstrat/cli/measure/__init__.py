"""``dstrat measure``: the speed of a machine, and the data of known machines."""
