"""Cloud drivers: what each cloud offers, and how nodes are launched and terminated. One folder per cloud."""
