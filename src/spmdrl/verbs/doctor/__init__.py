"""The verb `doctor`: checks, stage by stage, that this machine's devices can run a job."""
