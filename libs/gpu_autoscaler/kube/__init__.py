"""The door to Kubernetes: typed list and watch, the few writes we make, and the translation of objects into facts."""
