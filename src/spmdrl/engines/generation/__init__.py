"""Generation engines behind one protocol: requests in, responses out as they finish."""
