"""Preloaded module of multiprocessing's fork server: importing it lets the server exit fast."""

from dstrat.launch.fast_exit import leave_quickly_at_exit_of_server

# The server ends after the process that it serves, and holds the job's output open until then.  The import alone has
# this effect, so no other module may import this one.
leave_quickly_at_exit_of_server()
