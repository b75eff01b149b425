"""Lets node watchers into the broker, and publishes the notices that they report."""
