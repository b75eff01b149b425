"""Commands around the line: contracts written from the code, plans computed again from the record."""
