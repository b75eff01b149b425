"""What facts make of the state. Called by `core/fold.py`; nothing here decides."""
