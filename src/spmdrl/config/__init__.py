"""A run's configuration: one tree of frozen dataclasses, read strictly from YAML and overrides."""
