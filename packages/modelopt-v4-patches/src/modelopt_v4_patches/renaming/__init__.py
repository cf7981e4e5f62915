"""An export under other names: recognized, relabelled, in a new folder or in place."""
