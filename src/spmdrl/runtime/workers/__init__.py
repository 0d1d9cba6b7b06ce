"""Processes beside a rank that run users' functions: they can be killed, and leave nothing behind."""
