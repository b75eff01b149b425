"""What a request must be to become a job. Called by `core/admission.py`."""
