"""Starting the ranks of a local job, watching them, and ending all of them when one fails."""
