"""Fake Azure Resource Manager: the calls that the driver makes, with Azure's failure modes."""
