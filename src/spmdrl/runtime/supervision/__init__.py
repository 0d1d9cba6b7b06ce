"""Ends of a job: requests to stop, hangs, first failures, lost launchers and lost folders."""
