"""The command `jaxring`; also `python -m jaxring`."""
