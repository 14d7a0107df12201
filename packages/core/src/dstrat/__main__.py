"""The command line as ``python -m dstrat``."""

from dstrat.cli.main import main

main()
