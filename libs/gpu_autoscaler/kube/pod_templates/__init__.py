"""Pod templates of job requests: validation, dangerous fields, and what placement needs of them. Pure."""
