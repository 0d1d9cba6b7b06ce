"""A job's ends: requests to stop, ranks that stand still, first failures, lost launchers and lost folders."""
