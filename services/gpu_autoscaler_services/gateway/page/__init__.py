"""The live page: static files, served as they are."""
