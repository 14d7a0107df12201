"""Data loading: sharding by rank, resuming within an epoch, prefetching."""
