"""The command line, its help, and the one line about a failure."""

import sys

# Before any import of what only POSIX has.
if sys.platform == "win32":
    sys.stderr.write("spmdrl: needs Linux; on Windows run it in WSL 2 (wsl --install), as on any Linux\n")
    raise SystemExit(2)
