"""The door for people and programs: REST, Server-Sent Events, the live page, OpenAPI."""
