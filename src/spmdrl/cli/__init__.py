"""The command line, its help, and the one line about a failure."""
