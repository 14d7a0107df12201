"""Command line of training programs: arguments from signatures, configuration files, subcommands."""
