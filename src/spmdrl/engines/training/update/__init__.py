"""One optimizer step: gradients added up over micro-batches, totals over ranks, AdamW over shards."""
