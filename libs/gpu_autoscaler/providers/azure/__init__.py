"""Microsoft Azure. Needs the extra `azure`."""
