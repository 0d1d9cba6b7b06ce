"""What algorithms are made of: advantages, token losses, corrections of off-policy tokens."""
