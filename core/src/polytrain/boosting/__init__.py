"""Code that tree boosters share: options, table validation, categories, sampling, estimators."""
