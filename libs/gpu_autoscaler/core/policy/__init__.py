"""The scaling policy: settings, pools, validation, and policies kept as documents."""
