"""What every layer uses: settings, errors, events, places, and what Linux offers."""
