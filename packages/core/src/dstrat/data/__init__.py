"""What each process reads of the data, in which order, and how it goes on in the middle of an epoch."""
