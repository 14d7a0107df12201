"""Last preloaded module of multiprocessing's fork server: the server may outlive the thread that started it."""

from dstrat.launch.rank import outlive_parent

# The import alone has this effect, so no other module may import this one.
outlive_parent()
