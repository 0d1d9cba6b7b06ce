"""Model folders in the Hugging Face layout: config.json and weights, read, checked and written."""
