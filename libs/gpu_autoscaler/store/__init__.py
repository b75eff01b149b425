"""The store of record: accepted jobs, plans and the ledger, so that a stream is never the only copy."""
