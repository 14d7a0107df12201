"""``dstrat checkpoint``: looking at checkpoints, verifying, comparing and converting them."""
