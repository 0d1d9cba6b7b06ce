"""Who works on which rows: pure functions of metadata, which every rank evaluates alike."""
