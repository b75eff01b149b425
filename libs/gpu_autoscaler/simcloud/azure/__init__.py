"""A fake of Azure Resource Manager: the calls that the driver makes, with what goes wrong in the real one."""
