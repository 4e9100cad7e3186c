"""One run: a pure state machine that decides, and a controller that carries out."""
