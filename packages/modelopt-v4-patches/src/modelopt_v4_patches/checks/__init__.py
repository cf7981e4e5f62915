"""What `validate` looks at, one question per file.

``stored`` opens a checkpoint and sorts its tensors into the schema; ``structure`` holds it against
config.json, ``names`` against the schema; ``promised`` reads what quantization_config says of
every matrix; ``files`` looks beside the weights; ``values`` reads the weights, and the source's;
``calibration`` checks a snapshot.
"""
