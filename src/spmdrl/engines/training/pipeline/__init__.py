"""Pipeline parallelism: which rank runs which layers, and PyTorch's schedules around them."""
