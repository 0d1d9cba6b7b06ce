"""Sandbox for a policy's programs: namespaces, a filter of system calls, limits, and no access to their verdict."""
