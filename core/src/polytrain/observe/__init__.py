"""What looks at worker processes while they run."""
