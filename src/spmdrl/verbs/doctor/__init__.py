"""The verb `doctor`: what this machine's devices must do for a job, checked stage by stage."""
