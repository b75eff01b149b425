"""Entry point for people and programs: REST, Server-Sent Events, web page, OpenAPI."""
