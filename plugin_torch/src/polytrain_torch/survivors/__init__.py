"""What a rank keeps after each step, so that a loss of another rank costs no step."""
