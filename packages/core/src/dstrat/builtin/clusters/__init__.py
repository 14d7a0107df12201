"""Cluster environments: dstrat's own launcher, torchrun, schedulers, variables."""
