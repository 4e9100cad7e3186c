"""A module whose trainer polytrain refuses to make."""

from polytrain import make_trainer

trainer = make_trainer("xgbost")
