"""What a device must do for a job, checked stage by stage."""
