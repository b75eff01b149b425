"""A server that looks from outside like a GPU cluster in a cloud.

One process on loopback: the Kubernetes API with the controllers that matter here, and the cloud that sells
its nodes. Services meet it over HTTP only; tests and the demo may also drive its `World` in-process.
"""
