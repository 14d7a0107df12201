"""``dstrat verify``: a training with a strategy, compared with one device."""
