"""Where a job runs: started by dstrat itself, by torchrun, by a scheduler, or by hand."""
