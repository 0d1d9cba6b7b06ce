"""The scripts that start a run under Slurm and msrun, and the verb that fills them in; launch/ links to them."""
