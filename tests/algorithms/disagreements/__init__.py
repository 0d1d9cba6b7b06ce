"""The same random rows through other trainers' own functions and ours: `bash launch/disagreements.sh`."""
