"""A server that looks like a GPU cluster in a cloud from outside.

One loopback process: the Kubernetes API with the relevant controllers, and the cloud that offers its nodes. Services
use it over HTTP only; tests and the demo may also drive its `World` in-process.
"""
