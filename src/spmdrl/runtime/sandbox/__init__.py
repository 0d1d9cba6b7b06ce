"""Where programs run that a policy wrote: namespaces, a filter of system calls, limits, and no way to their verdict."""
