"""Settings of every test: the marks themselves are registered in pyproject.toml."""

from __future__ import annotations

import os

# Set before torch is imported: many small ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
