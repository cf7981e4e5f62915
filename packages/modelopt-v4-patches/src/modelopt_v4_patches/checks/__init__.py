"""What `validate` looks at besides the codec's checks of any DeepSeek-V4 checkpoint.

``manifest`` holds the files against what an export wrote down; ``calibration`` checks a snapshot.
"""
