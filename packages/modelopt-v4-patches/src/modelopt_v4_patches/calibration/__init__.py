"""What calibration needs around modelopt: texts, memory, the source, a way to read amax."""
