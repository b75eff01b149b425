"""What a cloud tells its own instances: reclaim notices and hints, read from each instance's metadata address."""
