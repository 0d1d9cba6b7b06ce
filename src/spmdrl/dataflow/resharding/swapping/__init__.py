"""Training state out to the host and back: what leaves the device while responses are generated."""
