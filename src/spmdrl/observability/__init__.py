"""Metrics, timeline, logs and the report; seen by all layers, knows none."""
