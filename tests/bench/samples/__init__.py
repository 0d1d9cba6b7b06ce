"""The sample flow on one node beside other stores."""
