"""What another policy would decide, live."""
