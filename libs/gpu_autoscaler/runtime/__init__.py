"""What every service shares: connection, decoding, publish before ack, retries, dead letters, metrics, logs, shutdown."""
