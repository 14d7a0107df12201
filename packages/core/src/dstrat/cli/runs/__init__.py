"""Commands about runs that were recorded: list, plot, report."""
