"""What storage gives, and what training has to wait for: closed forms that read nothing."""
