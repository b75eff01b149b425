"""Plans the cluster's size and executes the plan."""
