"""Google Cloud. Needs the extra `gcp`."""
