"""All plumbing, once: connect, decode, publish before ack, retry, dead letter, metrics, logs, limits, shutdown."""
