"""What is wrong with a DeepSeek-V4 checkpoint, one question per file; each finding by name.

``stored`` opens a checkpoint and sorts its tensors into the schema; ``structure`` holds it against
config.json, ``names`` against the schema; ``promised`` reads what quantization_config says of
every matrix and ``quantization`` whether that is true; ``folder`` looks beside the weights;
``values`` reads scales and weights, in tasks, and ``against`` holds them against the source's.
"""
