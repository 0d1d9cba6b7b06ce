"""Tests of the paths of CUDA devices and NPUs, without either."""
