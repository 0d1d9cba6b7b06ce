"""vLLM as a generation engine inside this process."""
