"""Checkpoints as data: what tensors a model has, and what every tool calls them.

Nothing in this package touches tensor values, so nothing in it imports torch.
"""
