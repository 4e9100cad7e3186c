"""Ray Train's names and signatures."""
