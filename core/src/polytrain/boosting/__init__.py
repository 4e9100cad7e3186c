"""What tree boosters share: table validation, categories, sampling, estimators."""
