"""`gpu-autoscaler ...`: data on stdout, words on stderr, exit codes that scripts can tell apart."""
