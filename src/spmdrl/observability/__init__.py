"""Metrics, timeline, logs and the report, for all layers."""
