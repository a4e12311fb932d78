"""Storage rates and waiting times of training: closed forms that read nothing."""
