"""Amazon Web Services. Needs the extra `aws`."""
