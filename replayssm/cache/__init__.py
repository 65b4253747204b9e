"""Who owns the tensors: checkpoint, read copy, ring and cursors of one layer, row by row."""

from replayssm.cache.replay import ReplayCache

__all__ = ["ReplayCache"]
