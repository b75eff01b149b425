"""The controllers of the cluster: scheduler, kubelets, jobs, budgets, node lifecycle, garbage.

Each records every change at once; `step` then does the work, in cluster time. Controllers do not call each other: they
communicate through the store, as the real ones do.
"""
