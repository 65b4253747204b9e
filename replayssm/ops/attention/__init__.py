"""Softmax attention of a few new tokens over many stored keys, on a GPU."""
