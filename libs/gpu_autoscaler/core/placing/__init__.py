"""What fits where, by conditions, amounts and company. Asked through `core/placement.py`."""
