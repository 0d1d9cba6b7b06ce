"""The paper's tables and figures, computed, emulated or measured in small."""
