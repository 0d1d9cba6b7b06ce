"""Division of rows over ranks: pure functions of metadata with the same result on every rank."""
