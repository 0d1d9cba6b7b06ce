"""Parts of algorithms: advantages, token losses, corrections of off-policy tokens."""
