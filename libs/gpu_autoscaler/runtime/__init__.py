"""What every service shares: decoding, publish before ack, retries, dead letters, metrics, logs, shutdown."""
