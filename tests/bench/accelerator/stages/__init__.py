"""The stages; each file has functions that the stage table names, which run in processes of their own."""
