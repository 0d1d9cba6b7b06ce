"""The operations worth a kernel of their own: one table from operation and kind of device to implementation."""
