"""The executors behind a plan: buckets of weights moved, checksummed and probed."""
