"""Published contracts, generated from the code: schemas, policy file, CRD."""
