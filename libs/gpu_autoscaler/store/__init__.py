"""The store of record: accepted jobs, plans and the ledger as rows, because a stream is never the only copy."""
