"""Keras on torch, imported as a function that chooses it does. For zygotes, see `tests.zygotes`.

A run doesn't preload for restarts what a function imports after it has set a variable.
"""

import importlib
import os

os.environ["KERAS_BACKEND"] = "torch"
importlib.import_module("keras")
# If it is there, Keras uses it to look at what `fit` is given.
importlib.import_module("tensorflow")
importlib.import_module("polytrain_torch.keras")
