"""Processes that run functions of others beside a rank: they can be killed, and leave nothing behind."""
