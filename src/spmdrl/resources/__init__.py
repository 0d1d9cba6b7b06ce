"""Layer 1, what we run on: launch environment, devices, process groups, layouts, memory."""
