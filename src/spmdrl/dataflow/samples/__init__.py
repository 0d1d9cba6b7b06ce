"""The sample flow, a distributed transfer dock: a warehouse a node, a controller a worker state in every rank."""
