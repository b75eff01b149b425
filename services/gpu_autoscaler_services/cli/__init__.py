"""`gpu-autoscaler ...`: data on stdout, messages on stderr, a distinct exit code per outcome."""
