"""Training of the built-in models: data, model code, optimiser, evaluation. Used by
``scripts/train_builtin.py`` only."""
