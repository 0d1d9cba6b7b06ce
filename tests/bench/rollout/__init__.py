"""Generated tokens per second beside other engines."""
