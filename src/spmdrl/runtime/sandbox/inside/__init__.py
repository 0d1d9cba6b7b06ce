"""Processes inside a box: its first process, the program, and the tests that call it."""
