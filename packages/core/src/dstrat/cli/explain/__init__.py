"""``dstrat explain``: the plan of a job, also of one on machines that are not there."""
