"""Parts of tools/train_tiny_dsv4.py: the text, the model as it is trained, the official format."""
