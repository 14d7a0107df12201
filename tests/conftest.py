"""What is in this folder and is not a test of the workspace."""

# A package with tests of its own, which test_sample_plugin.py runs where it is installed.
collect_ignore = ["sample_plugin"]
