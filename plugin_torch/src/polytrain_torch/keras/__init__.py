"""Keras on torch (`KERAS_BACKEND=torch`): a model that all workers train with `model.fit`."""

from polytrain_torch.keras.model import prepare_model

__all__ = ["prepare_model"]
