"""The sample flow, a distributed transfer dock: warehouses on each node, one controller per worker state in every rank."""
