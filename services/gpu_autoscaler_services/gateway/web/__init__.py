"""The web page: static files."""
