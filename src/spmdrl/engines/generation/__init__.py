"""Generation engines behind one protocol: requests in, finished responses out as they finish."""
