"""What is known of the cluster: records, tables, retention, history, and the queries that read them."""
