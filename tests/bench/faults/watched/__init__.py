"""Jobs that are watched while they run: ranks that hang or are slow, requests to stop, tools that never answer."""
