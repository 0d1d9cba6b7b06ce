"""Training beside other trainers: the update of one rank, and a whole step."""
