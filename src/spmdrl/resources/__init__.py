"""Layer 1, the machine: launch environment, devices, process groups, layouts, memory."""
