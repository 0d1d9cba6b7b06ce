"""Connections that strangers can't use: interfaces, gates, links and the job's secret."""
