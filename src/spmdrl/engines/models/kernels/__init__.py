"""Operations with kernels of their own: one table from operation and kind of device to implementation."""
