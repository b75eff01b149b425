"""Work that needs capacity, from every source, as demand items."""
