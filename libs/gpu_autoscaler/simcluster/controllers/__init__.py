"""The controllers of the cluster: scheduler, kubelets, jobs, budgets, node lifecycle, garbage.

Each hears every change at once and only notes it; `step` then does the work, in cluster time. No controller
calls another: they meet in the store, as the real ones do.
"""
